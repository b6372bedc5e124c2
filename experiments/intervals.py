"""Confidence intervals of mean scores."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from kvjax.experiments.results import Answer

_RESAMPLES = 1000
# 95 % of a normal distribution lie within this many standard deviations.
_DEVIATIONS = statistics.NormalDist().inv_cdf(0.975)
# Smaller differences of resampled means are rounding errors.
_EQUAL = 1e-6


def interval(answers: Sequence[Answer]) -> tuple[float, float]:
  """Computes the 95 % interval of a mean score over equally weighted tasks.

  It is a deterministic percentile bootstrap. Each task is resampled separately,
  and answers that were drawn together stay together: the turns of a
  conversation, and a sample's versions at several lengths.

  If no task has two different scores, or a task has only one sample, resampling
  would give an interval of width zero. Then the result is the Wilson interval
  (1927) for answers that are right or wrong, with as many trials as samples.
  Partial scores vary less at the same mean, so this interval is conservative.

  Args:
    answers: answers of one method at one budget, scored 0 to 100.
  """
  tasks: dict[str, dict[int, list[float]]] = {}
  for answer in answers:
    # The turns of a conversation have consecutive sample numbers.
    first = answer.sample - (answer.turn or 0)
    samples = tasks.setdefault(answer.task, {})
    samples.setdefault(first, []).append(answer.score)
  rng = np.random.default_rng(0)
  means = np.mean(
    [
      _resampled_means(list(samples_of_task.values()), rng)
      for samples_of_task in tasks.values()
    ],
    axis=0,
  )
  low, high = np.percentile(means, [2.5, 97.5])
  numbers = [len(samples_of_task) for samples_of_task in tasks.values()]
  if min(numbers) > 1 and high - low > _EQUAL:
    return float(low), float(high)
  # The effective number of trials of an unweighted mean over tasks.
  trials = len(numbers) ** 2 / sum(1 / number for number in numbers)
  mean = statistics.fmean(
    statistics.fmean(
      score for scores in samples_of_task.values() for score in scores
    )
    for samples_of_task in tasks.values()
  )
  return _wilson(mean, trials)


def _resampled_means(
  samples: Sequence[Sequence[float]], rng: np.random.Generator
) -> Float[np.ndarray, " R"]:
  """Computes mean scores of bootstrap resamples."""
  sums = np.array([sum(scores) for scores in samples], np.float64)
  sizes = np.array([len(scores) for scores in samples])
  picks = rng.integers(len(samples), size=(_RESAMPLES, len(samples)))
  return sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)


def _wilson(mean: float, trials: float) -> tuple[float, float]:
  """Computes the Wilson interval of a share, in percent."""
  share, square = mean / 100, _DEVIATIONS**2 / trials
  middle = share + square / 2
  half = math.sqrt(square * (share * (1 - share) + square / 4))
  low, high = (100 * (middle + sign * half) / (1 + square) for sign in (-1, 1))
  return max(0.0, low), min(100.0, high)
