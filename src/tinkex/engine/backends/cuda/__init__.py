"""Triton kernels for CUDA devices, and what is built from them."""
