"""A passkey of 64 digits in prose, at every length and depth."""
