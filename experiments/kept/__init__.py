"""Which tokens of a text survive, to be looked at."""
