"""Visualization of the tokens of a text that survive."""
