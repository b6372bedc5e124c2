"""The papers' benchmarks: which samples are asked, and where they come from."""
