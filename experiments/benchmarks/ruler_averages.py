"""RULER's leaderboard numbers for scores at several lengths."""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

# Llama-2-7B's average at 4,096 tokens.
ENOUGH = 85.6


class Averages(NamedTuple):
  """The averages of a model or method.

  Attributes:
    rising: mean with weights 1, 2, ... from the shortest length.
    falling: mean with weights 1, 2, ... from the longest length.
    effective: the longest length with a score of at least `ENOUGH`, if any.
  """

  rising: float
  falling: float
  effective: int | None


def averages(scores: Mapping[int, float]) -> Averages:
  """Computes the averages from the tasks' mean, 0 to 100, at each length."""
  lengths = sorted(scores)
  values = [scores[length] for length in lengths]
  weights = range(1, len(values) + 1)
  reached = [length for length in lengths if scores[length] >= ENOUGH]
  return Averages(
    statistics.fmean(values, weights),
    statistics.fmean(values, reversed(weights)),
    max(reached, default=None),
  )
