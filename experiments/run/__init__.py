"""Running candidates on samples, and what runs write."""
