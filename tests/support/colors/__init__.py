"""A toy benchmark: a folder with a metric of its own."""
