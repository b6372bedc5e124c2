"""Tests of whether scores of repeated runs are equal up to a margin."""

import math
import statistics
from collections.abc import Sequence

from jax.scipy.special import betainc


def equivalence(
  scores: Sequence[float], others: Sequence[float], margin: float
) -> float:
  """Tests whether the mean difference of paired scores is within a margin.

  These are two one-sided paired t-tests (TOST; Schuirmann, 1987), of a
  difference of at most -margin and of at least margin. A small p-value shows
  equality up to the margin, whereas a large one of an analysis of variance does
  not. If all differences are the same, it is 0 or 1.

  Args:
    scores: score of each trial.
    others: scores of the same trials.
    margin: greatest difference that counts as equal, above 0.

  Returns:
    The larger p-value of the two tests.
  """
  differences = [a - b for a, b in zip(scores, others, strict=True)]
  mean = statistics.fmean(differences)
  error = statistics.stdev(differences) / math.sqrt(len(differences))
  distance = margin - abs(mean)
  if error == 0:
    return float(distance <= 0)
  t, freedom = distance / error, len(differences) - 1
  # The upper tail of Student's t distribution.
  tail = 0.5 * float(betainc(freedom / 2, 0.5, freedom / (freedom + t * t)))
  return tail if t > 0 else 1.0 - tail
