"""Means over tasks and samples, and differences from the full cache."""

import collections
import dataclasses
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvjax.experiments.calibration.record_files import AUTO
from kvjax.experiments.run.candidates import FULL
from kvjax.experiments.run.intervals import interval
from kvjax.experiments.run.measured import Measured
from kvjax.experiments.run.results import Answer
from kvjax.experiments.run.summaries import PASS

Row = Mapping[str, Any]
Summary = Mapping[str, Any]
# Method and budget, which the rows of a table line share.
Name = tuple[str, str]
# What distinguishes the rows of a table line; scores over others differ by it.
PLACE = ("task", "length", "depth", "turn")
Place = tuple[object, ...]

# As `kvjax.Threshold` writes itself.
_THRESHOLD = "threshold "
_NUMBER = re.compile(
  rf"{_THRESHOLD}(-?[0-9]+(?:[.][0-9]+)?(?:e[-+]?[0-9]+)?)(?:, .*)?"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(Measured):
  """What rows say of caches and answers: means, and times of one prompt alone.

  Attributes:
    prefill_seconds: time until it is compressed, if known.
    token_seconds: time of a decoded token, if known.
  """

  prefill_seconds: float | None = None
  token_seconds: float | None = None


TIMED = tuple(field.name for field in dataclasses.fields(Timed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(Timed):
  """A method at a budget.

  Scores are 0 to 100. A task's rows are weighted by their samples, and all
  tasks have equal weight, also in the means of `Timed`.

  Attributes:
    method: name of the method.
    options: the method with all its hyperparameters.
    budget: the budget in words.
    score: mean over the tasks.
    tasks: the score of each task.
    places: the tasks, lengths, depths and turns that it is over.
    interval: confidence interval of the score, see `intervals.interval`; None
      without answers.
    delta: difference from the full cache's score, if that is known and over as
      many samples of each of `places`.
    samples: number of answers.
    passed: pass@k by its name, mean over the tasks, if several answers are
      drawn for each problem.
  """

  method: str
  options: str
  budget: str
  score: float
  tasks: Mapping[str, float]
  places: frozenset[Place]
  interval: tuple[float, float] | None
  delta: float | None
  samples: int
  passed: Mapping[str, float] = MappingProxyType({})

  @property
  def name(self) -> Name:
    """The name of its table line."""
    return self.method, self.budget

  @property
  def automatic(self) -> bool:
    """Whether each context had its own retention."""
    return _is_automatic(self.budget)

  @property
  def threshold(self) -> float | None:
    """The lowest score that is kept, if the budget is a finite threshold."""
    found = _NUMBER.fullmatch(self.budget)
    value = math.inf if found is None else float(found[1])
    return value if math.isfinite(value) else None

  @property
  def removed(self) -> float:
    """Share of the context's keys and values that was evicted.

    It is of the layers that methods evict from, as budgets are.
    """
    return max(0.0, 1 - evictable(vars(self)) / self.context_tokens)


def _is_automatic(budget: str) -> bool:
  return budget.startswith((AUTO, _THRESHOLD))


def grouped(rows: Iterable[Row]) -> dict[Name, list[Row]]:
  """Groups rows by method and budget: the full cache, then large budgets first.

  Automatic budgets follow the others, as they are.
  """
  groups: dict[Name, list[Row]] = {}
  for row in rows:
    groups.setdefault((row["method"], row["budget"]), []).append(row)
  places = list(dict.fromkeys(method for method, _ in groups))

  def position(name: Name) -> tuple[bool, int, bool, float]:
    automatic = _is_automatic(name[1])
    kept = mean_of(groups[name], lambda row: row["retention"])
    order = 0.0 if automatic else -kept
    return name[0] != FULL, places.index(name[0]), automatic, order

  return {name: groups[name] for name in sorted(groups, key=position)}


def means(rows: Iterable[Row], answers: Iterable[Answer] = ()) -> list[Mean]:
  """Computes the mean of each method and budget, in order.

  Args:
    rows: rows of a summary.
    answers: the answers behind the rows, for the intervals.
  """
  groups = grouped(rows)
  answers_of: dict[Name, list[Answer]] = {}
  for answer in answers:
    answers_of.setdefault((answer.method, answer.budget), []).append(answer)
  full = next((g for (name, _), g in groups.items() if name == FULL), [])
  return [
    _mean(group, answers_of.get(name, ()), full)
    for name, group in groups.items()
  ]


def complete(averages: Sequence[Mean]) -> list[Mean]:
  """Drops means over other places than most, which cannot be compared.

  What stays are means over the same tasks, lengths, depths and turns: over the
  largest number of them that any mean has, and if means have as many others,
  over those that more means have.
  """
  counts = collections.Counter(mean.places for mean in averages)
  most = max(counts, key=lambda own: (len(own), counts[own]), default=None)
  return [mean for mean in averages if mean.places == most]


def comparable(rows: Iterable[Row]) -> set[Name]:
  """Returns the methods and budgets whose means `complete` keeps."""
  return {mean.name for mean in complete(means(rows))}


def place(row: Row) -> Place:
  """Returns a row's task, length, depth and turn."""
  return tuple(row[name] for name in PLACE)


def ranked(averages: Sequence[Mean]) -> list[Mean]:
  """Sorts by method, the best first, after the full cache.

  A method counts with its mean over the budgets that all methods have or, if
  there are none, over its own. Methods without a mean that `complete` keeps
  come last.
  The budgets of a method keep their order.
  """
  merit = _merits(averages)
  places = list(dict.fromkeys(mean.method for mean in averages))
  return sorted(
    averages,
    key=lambda mean: (
      mean.method != FULL,
      -merit.get(mean.method, -math.inf),
      places.index(mean.method),
    ),
  )


def ranks(averages: Sequence[Mean]) -> dict[str, int]:
  """Counts the methods in the order of `ranked`; equal ones share a rank.

  The full cache and methods without a mean that `complete` keeps have none.
  """
  merits = _merits(averages)
  return {
    method: 1 + sum(other > merit for other in merits.values())
    for method, merit in merits.items()
  }


def score(row: Row) -> float:
  """Returns a row's main score, 0 to 100."""
  return row["score"]


def other_score(name: str) -> Callable[[Row], float]:
  """Returns an accessor of a score by its name."""
  return lambda row: row["scores"][name]


def mean_of(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
  """Averages over tasks; within a task, rows are weighted by samples."""
  return statistics.fmean(by_task(rows, value).values())


def reads_less(averages: Iterable[Mean]) -> bool:
  """Returns whether tokens attend to less than what is kept."""
  return any(mean.read_tokens != mean.kept_tokens for mean in averages)


def is_hybrid(averages: Iterable[Mean]) -> bool:
  """Returns whether some layers have a window and others have none."""
  return any(mean.global_tokens is not None for mean in averages)


# Of tables of such models.
OF_GLOBAL_LAYERS = "budgets are of the layers without a window"


def evictable(row: Row) -> float:
  """Returns the tokens that a row keeps in layers that methods evict from."""
  of_global: float | None = row.get("global_tokens")
  return row["kept_tokens"] if of_global is None else of_global


def by_task(
  rows: Sequence[Row], value: Callable[[Row], float]
) -> dict[str, float]:
  """Averages each task; its rows are weighted by samples."""
  tasks: dict[str, list[Row]] = {}
  for row in rows:
    tasks.setdefault(row["task"], []).append(row)
  return {
    task: statistics.fmean(
      [value(row) for row in group], [row["samples"] for row in group]
    )
    for task, group in tasks.items()
  }


def _merits(averages: Sequence[Mean]) -> dict[str, float]:
  """Returns what `ranked` compares; the full cache has none."""
  scores: dict[str, dict[str, float]] = {}
  for mean in complete(averages):
    if mean.method != FULL:
      scores.setdefault(mean.method, {})[mean.budget] = mean.score
  shared = set.intersection(*map(set, scores.values())) if scores else set()
  # Equal means of different scores may differ in their last digits.
  return {
    method: round(statistics.fmean(of[budget] for budget in shared or of), 6)
    for method, of in scores.items()
  }


def _mean(
  rows: Sequence[Row], answers: Sequence[Answer], full: Sequence[Row]
) -> Mean:
  first = rows[0]
  numbers: dict[str, Any] = {
    name: mean_of(rows, operator.itemgetter(name))
    for name in TIMED
    if all(row.get(name) is not None for row in rows)
  }
  passed = {
    name: mean_of(rows, other_score(name))
    for name in first["scores"]
    if name.startswith(PASS) and all(name in row["scores"] for row in rows)
  }
  return Mean(
    method=first["method"],
    options=first["options"],
    budget=first["budget"],
    score=mean_of(rows, score),
    tasks=by_task(rows, score),
    places=frozenset(map(place, rows)),
    interval=interval(answers) if answers else None,
    delta=_delta(rows, full),
    samples=sum(row["samples"] for row in rows),
    passed=passed,
    **numbers,
  )


def _delta(rows: Sequence[Row], full: Sequence[Row]) -> float | None:
  """Subtracts the full cache's score, if it has the same samples."""
  if rows[0]["method"] == FULL or _samples(rows) != _samples(full):
    return None
  return mean_of(rows, score) - mean_of(full, score)


def _samples(rows: Iterable[Row]) -> dict[Place, int]:
  return {place(row): row["samples"] for row in rows}
