"""Tilepress: TileLang attention kernels, pressed ahead of time into one static library with a C ABI."""
