"""Confidence intervals of mean scores, and of their differences."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from kvjax.experiments.run.results import Answer

_RESAMPLES = 1000
# 95 % of a normal distribution lie within this many standard deviations.
_DEVIATIONS = statistics.NormalDist().inv_cdf(0.975)
# Smaller differences of resampled means are rounding errors.
_EQUAL = 1e-6
# With fewer samples of a task, resampled differences vary too little.
_ENOUGH_PAIRS = 10

# Scores of each task by sample. Those of a sample were drawn together.
_Scores = Mapping[str, Mapping[str | int, Sequence[float]]]


def interval(
  answers: Sequence[Answer],
  weights: Mapping[str, float] | None = None,
  score: str = "score",
) -> tuple[float, float]:
  """Computes the 95 % interval of a mean score over tasks.

  It is a deterministic percentile bootstrap. Each task is resampled separately,
  and answers that were drawn together stay together: the turns of a
  conversation, the draws for a prompt, and a sample's versions at several
  lengths.

  If no task has two different scores, or a task has only one sample, resampling
  would give an interval of width zero. Then the result is the Wilson interval
  (1927) for answers that are right or wrong, with as many trials as samples.
  Partial scores vary less at the same mean, so this interval is conservative.

  Args:
    answers: answers of one method at one budget, scored 0 to 100.
    weights: weight of each task, with a sum of 1; equal if None.
    score: name of the score.
  """
  scores = _by_sample((answer, answer.scores[score]) for answer in answers)
  return _interval(scores, weights, 2, 0.0)


def difference(
  answers: Sequence[Answer],
  others: Sequence[Answer],
  weights: Mapping[str, float] | None = None,
  score: str = "score",
) -> tuple[float, float]:
  """Computes the 95 % interval of a mean score minus that of other answers.

  It is the interval of the mean of the differences on samples that both
  answered; see `interval`. The Wilson interval, here from -100 to 100, also
  applies if a task has fewer than ten samples.

  Args:
    answers: answers of one method at one budget, scored 0 to 100.
    others: answers of another one.
    weights: see `interval`.
    score: see `interval`.
  """
  paired = {(other.part, other.asked): other.scores[score] for other in others}
  scores = _by_sample(
    (answer, answer.scores[score] - paired[answer.part, answer.asked])
    for answer in answers
    if (answer.part, answer.asked) in paired
  )
  return _interval(scores, weights, _ENOUGH_PAIRS, -100.0)


def of_scores(scores: Mapping[str, Sequence[float]]) -> tuple[float, float]:
  """Computes the 95 % interval of the mean of all scores; see `interval`.

  Args:
    scores: scores from 0 to 100 by task, one per sample.
  """
  total = sum(map(len, scores.values()))
  weights = {task: len(values) / total for task, values in scores.items()}
  apart: dict[str, dict[str | int, list[float]]] = {
    task: {index: [score] for index, score in enumerate(values)}
    for task, values in scores.items()
  }
  return _interval(apart, weights, 2, 0.0)


def of_values(values: Mapping[str, Sequence[float]]) -> tuple[float, float]:
  """Computes the 95 % interval of the mean of all values; see `of_ratio`.

  Args:
    values: the values of the samples of each task.
  """
  return of_ratio({k: [(v, 1.0) for v in values[k]] for k in values})


def of_ratio(
  pairs: Mapping[str, Sequence[tuple[float, float]]],
) -> tuple[float, float]:
  """Computes the 95 % interval of the ratio of two means of the same samples.

  It is a deterministic percentile bootstrap; each task is resampled separately.

  Args:
    pairs: both values of each sample by task; the second ones are above 0.
  """
  rng = np.random.default_rng(0)
  sums = np.zeros((_RESAMPLES, 2))
  for values in pairs.values():
    picks = rng.integers(len(values), size=(_RESAMPLES, len(values)))
    sums += np.array(values, np.float64)[picks].sum(axis=1)
  low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
  return float(low), float(high)


def count_samples(answers: Sequence[Answer]) -> int:
  """Counts the samples of all tasks; those drawn together count once."""
  scores = _by_sample((answer, 0.0) for answer in answers)
  return sum(map(len, scores.values()))


def _by_sample(
  scores: Iterable[tuple[Answer, float]],
) -> dict[str, dict[str | int, list[float]]]:
  tasks: dict[str, dict[str | int, list[float]]] = {}
  for answer, score in scores:
    samples = tasks.setdefault(answer.task, {})
    samples.setdefault(answer.drawn_with, []).append(score)
  return tasks


def _interval(
  scores: _Scores,
  weights: Mapping[str, float] | None,
  fewest: int,
  lowest: float,
) -> tuple[float, float]:
  """Computes the interval of a weighted mean over tasks.

  Args:
    scores: the scores, from `lowest` to 100.
    weights: weight of each task; equal if None.
    fewest: samples that each task needs for resampling.
    lowest: the lowest possible score.
  """
  if weights is None:
    weights = dict.fromkeys(scores, 1 / len(scores))
  rng = np.random.default_rng(0)
  samples = {task: list(scores[task].values()) for task in weights}
  means = sum(
    weight * _resampled_means(samples[task], rng)
    for task, weight in weights.items()
  )
  low, high = np.percentile(means, [2.5, 97.5])
  if min(map(len, samples.values())) >= fewest and high - low > _EQUAL:
    return float(low), float(high)
  # The effective number of trials of a weighted mean over tasks.
  trials = 1 / sum(w**2 / len(samples[task]) for task, w in weights.items())
  mean = sum(
    weight * statistics.fmean(x for sample in samples[task] for x in sample)
    for task, weight in weights.items()
  )
  return _wilson(mean, trials, lowest)


def _resampled_means(
  samples: Sequence[Sequence[float]], rng: np.random.Generator
) -> Float[np.ndarray, " R"]:
  """Computes mean scores of bootstrap resamples."""
  sums = np.array([sum(scores) for scores in samples], np.float64)
  sizes = np.array([len(scores) for scores in samples])
  picks = rng.integers(len(samples), size=(_RESAMPLES, len(samples)))
  return sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)


def _wilson(mean: float, trials: float, lowest: float) -> tuple[float, float]:
  """Computes the Wilson interval of a mean between `lowest` and 100."""
  span = 100.0 - lowest
  share, square = (mean - lowest) / span, _DEVIATIONS**2 / trials
  middle = share + square / 2
  half = math.sqrt(square * (share * (1 - share) + square / 4))
  low, high = (
    lowest + span * (middle + sign * half) / (1 + square) for sign in (-1, 1)
  )
  return max(lowest, low), min(100.0, high)
