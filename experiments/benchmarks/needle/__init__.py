"""A number in prose, at every length and depth."""
