"""Binaries that train, compare and measure."""
