"""The retention from which on a cache recites its context."""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def least_reciting(
  recited: Float[np.ndarray, "B R"], grid: Sequence[float], target: float
) -> Float[np.ndarray, " B"]:
  """Returns the first retention from which on all recite the target.

  It is 1 if the highest retention of the grid does not, if a quality is NaN,
  and for a target of 1. It never falls as the target rises.

  Args:
    recited: quality at each retention of the grid, as `kvjax.recited` has it.
    grid: retentions, ascending.
    target: the quality to reach.
  """
  # From the highest retention down to the first one that fails.
  enough = np.logical_and.accumulate(recited[:, ::-1] >= target, axis=1)
  first = recited.shape[1] - np.sum(enough, axis=1)
  known = ~np.any(np.isnan(recited), axis=1) & (target < 1)
  return np.where(known, np.array([*grid, 1.0])[first], 1.0)


def digest(weights: Sequence[tuple[int, float]]) -> str:
  """Tells weights of tokens from others, by twelve hexadecimal digits."""
  return hashlib.sha256(repr(tuple(weights)).encode()).hexdigest()[:12]
