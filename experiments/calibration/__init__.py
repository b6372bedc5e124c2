"""Calibration of automatic retention: measurement, fit, records, reports."""
