"""Tests that compile and link: real toolchains, stub libraries, no GPU."""
