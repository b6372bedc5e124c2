"""How predictions are scored: RULER's, LongBench's and the needles' metrics."""
