"""Implementations of single ops: the numpy reference that decides what is right, and kernels for accelerators."""
