"""Compiles programs for TPUs and GPUs, of kernels and of published models."""
