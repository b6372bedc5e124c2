"""How sure a mean score is."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from kvjax.experiments.results import Answer

_RESAMPLES = 1000
# Of a normal distribution, 95 % lie within so many deviations.
_DEVIATIONS = statistics.NormalDist().inv_cdf(0.975)
# Scores whose resampled means differ by less are equal but for rounding.
_EQUAL = 1e-6


def interval(answers: Sequence[Answer]) -> tuple[float, float]:
  """The 95 % interval of a mean score, 0 to 100, over tasks that count alike.

  It is a percentile bootstrap, the same for the same answers. Each task is
  resampled by itself, and answers that were drawn together stay together: the
  turns of a conversation, and what has one number at several lengths.

  Where no task has two that differ, or a task has one only, resampling would
  take the mean for certain. The interval then is the one of Wilson (1927) for
  answers that are right or wrong, with as many trials as samples; scores that
  lie between vary less at the same mean, so that it is rather too wide.

  Args:
    answers: of one method at one budget.
  """
  tasks: dict[str, dict[int, list[float]]] = {}
  for answer in answers:
    # Turns are numbered on from the first of their conversation.
    first = answer.sample - (answer.turn or 0)
    samples = tasks.setdefault(answer.task, {})
    samples.setdefault(first, []).append(answer.score)
  rng = np.random.default_rng(0)
  means = np.mean(
    [_resampled(list(own.values()), rng) for own in tasks.values()], axis=0
  )
  low, high = np.percentile(means, [2.5, 97.5])
  numbers = [len(own) for own in tasks.values()]
  if min(numbers) > 1 and high - low > _EQUAL:
    return float(low), float(high)
  # Of a mean over tasks, in proportion to one over its variance.
  trials = len(numbers) ** 2 / sum(1 / number for number in numbers)
  mean = statistics.fmean(
    statistics.fmean(score for each in own.values() for score in each)
    for own in tasks.values()
  )
  return _wilson(mean, trials)


def _resampled(
  samples: Sequence[Sequence[float]], rng: np.random.Generator
) -> Float[np.ndarray, " R"]:
  """The mean score of as many samples as there are, drawn with repetition."""
  sums = np.array([sum(scores) for scores in samples], np.float64)
  sizes = np.array([len(scores) for scores in samples])
  picks = rng.integers(len(samples), size=(_RESAMPLES, len(samples)))
  return sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)


def _wilson(mean: float, trials: float) -> tuple[float, float]:
  """The score interval of a share, in percent."""
  share, square = mean / 100, _DEVIATIONS**2 / trials
  middle = share + square / 2
  half = math.sqrt(square * (share * (1 - share) + square / 4))
  low, high = (100 * (middle + sign * half) / (1 + square) for sign in (-1, 1))
  return max(0.0, low), min(100.0, high)
