"""Averages over LongBench's datasets."""

import statistics
from collections.abc import Mapping, Sequence
from typing import get_args

from kvjax.experiments.benchmarks.longbench.sets import (
  BUCKETS,
  LONGBENCH_E,
  SETS,
  Category,
  Language,
)


def averages(scores: Mapping[str, float]) -> dict[str, float]:
  """Computes means of datasets, by label.

  The official averages are means of the categories' means, for English and for
  Chinese, each with the code datasets. Papers on KV caches use the plain mean
  of the 16 English and code datasets. LongBench-E has an average per bucket of
  lengths. If datasets are missing, the label shows their number.

  Args:
    scores: scores by task name, as in `reader.samples`; others are ignored.

  Returns:
    The means of the categories, then the averages, as available.
  """
  result: dict[str, float] = {}
  for language in get_args(Language):
    result |= _official(language, scores)
  english = [name for name in SETS if SETS[name].language == "English"]
  result |= _mean("16 English and code sets, plain mean", english, scores)
  for bucket in BUCKETS:
    tasks = [f"{name}_e_{bucket}" for name in LONGBENCH_E]
    result |= _mean(f"LongBench-E {bucket}, plain mean", tasks, scores)
  return result


def _official(
  language: Language, scores: Mapping[str, float]
) -> dict[str, float]:
  sets = [
    name
    for name, data_set in SETS.items()
    if data_set.language == language or data_set.category == "code"
  ]
  if all(SETS[name].category == "code" for name in sets if name in scores):
    return {}
  means: dict[str, float] = {}
  for category in get_args(Category):
    names = [name for name in sets if SETS[name].category == category]
    means |= _mean(f"{language}, {category}", names, scores)
  label = _label(f"{language}, mean of the categories", sets, scores)
  return means | {label: statistics.fmean(means.values())}


def _mean(
  label: str, names: Sequence[str], scores: Mapping[str, float]
) -> dict[str, float]:
  """Averages the available scores; empty if there are none."""
  available = [scores[name] for name in names if name in scores]
  if not available:
    return {}
  return {_label(label, names, scores): statistics.fmean(available)}


def _label(
  label: str, names: Sequence[str], scores: Mapping[str, float]
) -> str:
  count = sum(name in scores for name in names)
  if count == len(names):
    return label
  return f"{label} ({count} of {len(names)} sets)"
