"""Analyses of papers that are not benchmarks, one small function each."""
