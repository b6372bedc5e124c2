"""What the benchmark programs time."""
