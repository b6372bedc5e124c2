"""The papers' benchmarks: their samples and data sources."""
