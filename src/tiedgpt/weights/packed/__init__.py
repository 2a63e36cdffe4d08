"""Weights laid out once for CPU kernels, in a file that loads by memory map."""
