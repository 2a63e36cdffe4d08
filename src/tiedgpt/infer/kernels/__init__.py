"""Whole-step decoding on CPUs: Numba kernels over weights packed once."""
