"""The averages over the sets of LongBench that are in use."""

import statistics
from collections.abc import Mapping, Sequence
from typing import get_args

from kvjax.experiments.benchmarks.longbench_sets import (
  BUCKETS,
  LONGBENCH_E,
  SETS,
  Category,
  Language,
)


def averages(scores: Mapping[str, float]) -> dict[str, float]:
  """Means of sets, by labels that tell them apart.

  The official averages are means of the categories' means, for English and for
  Chinese, each with the sets of code; papers on KV caches take the plain mean
  of the 16 English and code sets. LongBench-E has one for each bucket of
  lengths. Where sets are missing, the label says how many there are.

  Args:
    scores: of tasks, named as `longbench.samples` does; others are passed over.

  Returns:
    The means of the categories, then the averages, as far as there are scores.
  """
  found: dict[str, float] = {}
  for language in get_args(Language):
    found |= _official(language, scores)
  english = [name for name in SETS if SETS[name].language == "English"]
  found |= _mean("16 English and code sets, plain mean", english, scores)
  for bucket in BUCKETS:
    tasks = [f"{name}_e_{bucket}" for name in LONGBENCH_E]
    found |= _mean(f"LongBench-E {bucket}, plain mean", tasks, scores)
  return found


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
  """The mean of the scores that there are, with its label, if there are any."""
  own = [scores[name] for name in names if name in scores]
  return {_label(label, names, scores): statistics.fmean(own)} if own else {}


def _label(
  label: str, names: Sequence[str], scores: Mapping[str, float]
) -> str:
  there = sum(name in scores for name in names)
  if there == len(names):
    return label
  return f"{label} ({there} of {len(names)} sets)"
