"""Metrics of RULER, LongBench and needle tasks."""
