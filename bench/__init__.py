"""Measurements of the library, and the inputs and the fp32 reference that they share with the GPU tests."""
