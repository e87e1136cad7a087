"""Tests that run the library on a GPU, against its JIT twin and an fp32 reference."""
