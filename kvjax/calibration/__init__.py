"""Calibration of the retention of each context."""
