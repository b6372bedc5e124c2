"""Means over tasks and samples, and how far they are from the full cache's."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvjax.experiments.calibration.records import AUTO
from kvjax.experiments.candidates import FULL
from kvjax.experiments.intervals import interval
from kvjax.experiments.results import Answer

Row = Mapping[str, Any]
Summary = Mapping[str, Any]
# What the rows of one line in a table share.
Name = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Mean:
  """A method at a budget.

  Scores are 0 to 100; of a task's rows each counts as often as it has samples,
  and all tasks count alike.

  Attributes:
    method: its name.
    options: the method with all its hyper-parameters.
    budget: what it might keep, in words.
    retention: share of the context it might keep, mean over the tasks.
    score: mean over the tasks.
    tasks: the score of each task.
    interval: of the score, see `intervals.interval`; None without answers.
    delta: score less the full cache's, if it is there.
    samples: answers that were averaged.
    context_tokens: tokens of the context.
    kept_tokens: those kept, mean over layers and KV heads.
    read_tokens: those that a token attends to.
    cache_bytes: allocated per sample.
    host_bytes: those of them that live with the host.
  """

  method: str
  options: str
  budget: str
  retention: float
  score: float
  tasks: Mapping[str, float]
  interval: tuple[float, float] | None
  delta: float | None
  samples: int
  context_tokens: float
  kept_tokens: float
  read_tokens: float
  cache_bytes: float
  host_bytes: float

  @property
  def name(self) -> Name:
    """What a line of a table is named by."""
    return self.method, self.budget

  @property
  def automatic(self) -> bool:
    """Whether each context had a retention of its own."""
    return self.budget.startswith(AUTO)

  @property
  def removed(self) -> float:
    """Share of the context's keys and values that is gone."""
    return max(0.0, 1 - self.kept_tokens / self.context_tokens)


def grouped(rows: Iterable[Row]) -> dict[Name, list[Row]]:
  """Rows by method and budget, the full cache first.

  At a retention of 1 it stands for all methods: where its rows have their
  names too, these are left out.
  """
  rows = list(rows)
  full = {row["options"] for row in rows if row["method"] == FULL}
  groups: dict[Name, list[Row]] = {}
  for row in rows:
    if row["method"] == FULL or row["options"] not in full:
      groups.setdefault((row["method"], row["budget"]), []).append(row)
  return dict(sorted(groups.items(), key=lambda item: item[0][0] != FULL))


def means(rows: Iterable[Row], answers: Iterable[Answer] = ()) -> list[Mean]:
  """One for each method and budget, in order.

  Args:
    rows: of a summary.
    answers: that the rows were averaged from, for the intervals.
  """
  groups = grouped(rows)
  own: dict[Name, list[Answer]] = {}
  for answer in answers:
    own.setdefault((answer.method, answer.budget), []).append(answer)
  full = next((g for (name, _), g in groups.items() if name == FULL), None)
  yardstick = None if full is None else mean_of(full, score)
  return [
    _mean(group, own.get(name, ()), yardstick) for name, group in groups.items()
  ]


def score(row: Row) -> float:
  """A row's main score, 0 to 100."""
  return row["score"]


def mean_of(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
  """Over the tasks, each of which is weighted by samples within."""
  return statistics.fmean(_by_task(rows, value).values())


def reads_less(found: Iterable[Mean]) -> bool:
  """Whether tokens attend to less than what is kept."""
  return any(mean.read_tokens != mean.kept_tokens for mean in found)


def _by_task(
  rows: Sequence[Row], value: Callable[[Row], float]
) -> dict[str, float]:
  tasks: dict[str, list[Row]] = {}
  for row in rows:
    tasks.setdefault(row["task"], []).append(row)
  return {
    task: statistics.fmean(
      [value(row) for row in group], [row["samples"] for row in group]
    )
    for task, group in tasks.items()
  }


def _mean(
  rows: Sequence[Row], answers: Sequence[Answer], yardstick: float | None
) -> Mean:
  first = rows[0]
  tasks = _by_task(rows, score)
  mean = statistics.fmean(tasks.values())
  delta = None
  if yardstick is not None and first["method"] != FULL:
    delta = mean - yardstick

  def over_tasks(name: str) -> float:
    return mean_of(rows, lambda row: row[name])

  return Mean(
    method=first["method"],
    options=first["options"],
    budget=first["budget"],
    score=mean,
    tasks=tasks,
    interval=interval(answers) if answers else None,
    delta=delta,
    samples=sum(row["samples"] for row in rows),
    retention=over_tasks("retention"),
    context_tokens=over_tasks("context_tokens"),
    kept_tokens=over_tasks("kept_tokens"),
    read_tokens=over_tasks("read_tokens"),
    cache_bytes=over_tasks("cache_bytes"),
    host_bytes=over_tasks("host_bytes"),
  )
