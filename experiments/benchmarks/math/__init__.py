"""Mathematical problems with long answers."""
