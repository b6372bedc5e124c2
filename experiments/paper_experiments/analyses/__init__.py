"""What papers measure beside benchmarks, each by a small function."""
