"""Tests of whether scores of repeated runs are equal up to a margin."""

import statistics
from collections.abc import Sequence


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
  # Rounding leaves a deviation where there is none.
  if statistics.pstdev(differences) < 1e-9 * max(abs(mean), margin):
    return float(abs(mean) >= margin)
  from scipy import stats  # Takes as long to import as all of this program.

  tests = [
    stats.ttest_1samp(differences, -margin, alternative="greater"),
    stats.ttest_1samp(differences, margin, alternative="less"),
  ]
  return max(float(test.pvalue) for test in tests)
