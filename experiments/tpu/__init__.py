"""Compiles programs for TPUs and analyzes the compiled code."""
