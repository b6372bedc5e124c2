"""Compiles programs for TPUs, of kernels and of published models."""
