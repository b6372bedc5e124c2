"""Compares our numbers with the paper's."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.experiments.candidates import FULL, Candidate
from kvjax.experiments.paper_experiments.findings import Scale
from kvjax.experiments.paper_experiments.records import (
  Average,
  Column,
  Comparison,
  Key,
  Line,
  Place,
  Targets,
)
from kvjax.experiments.reporting import series, wording
from kvjax.experiments.reporting.formats import Table
from kvjax.experiments.reporting.means import Row, mean_of
from kvjax.experiments.reporting.wording import NOTHING

# Scores with a smaller difference look equal at one decimal.
_EQUAL = 0.05

# The candidate of a line in a column; None if it does not run.
Cells = Mapping[tuple[Line, Column], Candidate | None]


class PaperComparison(NamedTuple):
  """The numbers of a comparison.

  Attributes:
    comparison: the comparison.
    scale: the scale of its setup.
    averages: averages over the tasks that ran, of scores that all rows have;
      see `averages_of`.
    ours: our numbers, for averages and tasks.
    here: the budget that a line in a column had here.
  """

  comparison: Comparison
  scale: Scale
  averages: Mapping[str, Average]
  ours: Mapping[Key, float]
  here: Mapping[tuple[str, str], str]


def compare_to_paper(
  comparison: Comparison, scale: Scale, cells: Cells, rows: Sequence[Row]
) -> PaperComparison:
  """Averages the rows of a summary as the paper does.

  Args:
    comparison: the comparison.
    scale: the scale of its setup.
    cells: the candidate of each cell.
    rows: rows of the summary. Averages of scores that older answers lack are
      left out.
  """
  tasks = list(dict.fromkeys(row["task"] for row in rows))
  averages = {
    name: average
    for name, average in averages_of(comparison, tasks).items()
    if all(average.score in ("score", *row["scores"]) for row in rows)
  }
  quantities = [*averages.values(), *_single_tasks(averages, tasks)]
  ours, here = {}, {}
  for (line, column), candidate in cells.items():
    place = column.at(scale)
    if candidate is None or place is None:
      continue
    matching = [row for row in rows if _matches(row, candidate, place)]
    here[line.name, column.name] = _describe(candidate)
    for quantity in quantities:
      ours[Key(line.name, column.name, quantity.name)] = mean(
        quantity, matching
      )
  return PaperComparison(comparison, scale, averages, ours, here)


def averages_of(
  comparison: Comparison, tasks_run: Sequence[str]
) -> dict[str, Average]:
  """Restricts the paper's averages to the tasks that ran.

  An average without any of these tasks is dropped. The headline average becomes
  the mean of all tasks that ran instead.
  """
  kept = {}
  for number, average in enumerate(comparison.averages):
    groups = [
      tuple(task for task in group if task in tasks_run)
      for group in average.groups
    ]
    groups = [group for group in groups if group]
    if not groups and number == 0:
      groups = [tuple(tasks_run)]
    if groups:
      kept[average.name] = Average(average.name, tuple(groups), average.score)
  return kept


def mean(average: Average, rows: Sequence[Row]) -> float:
  """Computes the mean of the means of the groups, 0 to 100."""

  def score(row: Row) -> float:
    if average.score == "score":
      return row["score"]
    return row["scores"][average.score]

  return statistics.fmean(
    mean_of([row for row in rows if row["task"] in group], score)
    for group in average.groups
  )


def tables(compared: PaperComparison) -> list[Table]:
  """Builds a table per average, and one per line printed by task."""
  shown = [_of_average(compared, name) for name in compared.averages]
  return [*shown, *_by_task(compared)]


def orders(compared: PaperComparison) -> list[str]:
  """Describes the order of methods at each column, here and in the paper.

  The full cache and doubtful numbers are left out. A line says so if all
  methods score the same here.
  """
  headline = next(iter(compared.averages))
  lines = []
  equal: dict[str, list[str]] = {}
  for column in compared.comparison.columns:
    scores = {
      line.name: compared.ours[key]
      for line in compared.comparison.lines
      if line.paper.method != FULL
      and (key := Key(line.name, column.name, headline)) in compared.ours
    }
    if len(scores) > 1 and max(scores.values()) - min(scores.values()) < _EQUAL:
      equal.setdefault(f"{max(scores.values()):.1f}", []).append(column.name)
      continue
    ranked: dict[str, list[str]] = {}
    for targets in compared.comparison.targets:
      theirs = {
        name: targets.numbers[key]
        for name in scores
        if (key := Key(name, column.name, headline)) in targets.numbers
        and name not in targets.doubts
      }
      if len(theirs) > 1:
        ours = order({name: scores[name] for name in theirs})
        text = f"{targets.model} {order(theirs)}"
        ranked.setdefault(ours, []).append(text)
    lines += [
      f"Order at {column.name}: ours {ours}; {'; '.join(theirs)}."
      for ours, theirs in ranked.items()
    ]
  return lines + [
    f"At {', '.join(columns)} all methods score {score} here, which tells "
    "nothing about their order."
    for score, columns in equal.items()
  ]


def order(scores: Mapping[str, float]) -> str:
  """Lists names from best to worst, as in `a > b = c`."""
  ranked = sorted(scores, key=lambda name: -scores[name])
  text = ranked[0]
  for better, name in itertools.pairwise(ranked):
    close = scores[better] - scores[name] < _EQUAL
    text += f" {'=' if close else '>'} {name}"
  return text


def as_data(compared: PaperComparison) -> list[dict[str, Any]]:
  """Returns one record per cell, for other programs."""
  keys = dict.fromkeys(compared.ours)
  for targets in compared.comparison.targets:
    keys |= dict.fromkeys(targets.numbers)
  return [
    {
      "line": key.line,
      "column": key.column,
      "what": key.what,
      "here": compared.here.get((key.line, key.column)),
      "ours": compared.ours.get(key),
      "paper": {
        targets.model: targets.numbers[key]
        for targets in compared.comparison.targets
        if key in targets.numbers
      },
    }
    for key in keys
  ]


def _single_tasks(
  averages: Mapping[str, Average], tasks: Sequence[str]
) -> Iterator[Average]:
  """Yields each task as its own average, if there are several."""
  if len(tasks) > 1:
    yield from (Average(t, ((t,),)) for t in tasks if t not in averages)


def _matches(row: Row, candidate: Candidate, place: Place) -> bool:
  return (
    (row["method"], row["budget"]) == (candidate.method, candidate.budget)
    and place.length in (None, row["length"])
    and place.turn in (None, row["turn"])
  )


def _describe(candidate: Candidate) -> str:
  """Describes what a candidate keeps or retrieves."""
  return wording.budget(candidate.method, candidate.budget)


def methods(compared: PaperComparison) -> str:
  """Lists the methods that the paper's names stand for here."""
  scale = compared.scale
  names = [
    f"{line.name} is {way.method}"
    for line in compared.comparison.lines
    if (way := line.at(scale)) is not None
  ]
  return f"{'; '.join(names)}."


def _of_average(compared: PaperComparison, name: str) -> Table:
  small = compared.scale == "small"
  full = _full(compared.comparison)
  lines = []
  for line in _names(compared.comparison):
    cell_lines = (
      (line, column.name, *_here(compared, line, column.name, small), *cells)
      for column in compared.comparison.columns
      if set(cells := _cells(compared, Key(line, column.name, name)))
      != {NOTHING}
    )
    lines += _compact(cell_lines, line in full)
  header = ["method", "at", *(["here"] if small else []), *_models(compared)]
  return Table(_title(compared, name), header, lines, names=3 if small else 2)


def _full(comparison: Comparison) -> set[str]:
  """Returns the names of the full cache."""
  return {x.name for x in comparison.lines if x.paper.method == FULL}


def _here(
  compared: PaperComparison, line: str, column: str, small: bool
) -> tuple[str, ...]:
  """Describes a cell at the small scale; nothing at the paper's scale."""
  return (compared.here.get((line, column), NOTHING),) if small else ()


def _cells(compared: PaperComparison, key: Key) -> list[str]:
  """Formats our number and those of the paper's models."""
  ours = series.number(compared.ours.get(key))
  return [ours, *(_printed(t, key) for t in compared.comparison.targets)]


def _models(compared: PaperComparison) -> list[str]:
  return ["ours", *(targets.model for targets in compared.comparison.targets)]


def _compact(lines: Iterable[Sequence[str]], full: bool) -> list[Sequence[str]]:
  """Merges lines that differ only in the column.

  Args:
    lines: the results of a method, a line per column.
    full: whether the method is the full cache, whose missing results equal the
      others.
  """
  lines = list(lines)
  values = [
    {cell for cell in cells if not full or cell != NOTHING} or {NOTHING}
    for cells in zip(*lines, strict=True)
  ]
  names, _, *numbers = values or [set(), set()]
  if len(lines) > 1 and all(len(column) == 1 for column in (names, *numbers)):
    return [(*names, "all", *(column.pop() for column in numbers))]
  return lines


def _title(compared: PaperComparison, name: str) -> str:
  """Names the average and the tasks of it that ran."""
  wanted = next(a for a in compared.comparison.averages if a.name == name).tasks
  tasks_run = compared.averages[name].tasks
  title = f"{compared.comparison.name}: {name}"
  if set(tasks_run) == set(wanted):
    return title
  if set(tasks_run) <= set(wanted):
    return f"{title} (ours: {len(tasks_run)} of {len(wanted)} tasks)"
  return f"{title} (ours: mean of {', '.join(tasks_run)})"


def _by_task(compared: PaperComparison) -> Iterator[Table]:
  """Yields tables of lines whose tasks the paper prints and we ran."""
  tasks_run = {key.what for key in compared.ours} - set(compared.averages)
  tasks = [
    task for task in compared.comparison.paper.tasks if task in tasks_run
  ]
  printed = {
    key for targets in compared.comparison.targets for key in targets.numbers
  }
  full = _full(compared.comparison)
  for line in _names(compared.comparison):
    lines: list[Sequence[str]] = []
    for task in tasks:
      keys = [Key(line, c.name, task) for c in compared.comparison.columns]
      cell_lines = (
        (task, key.column, *_cells(compared, key))
        for key in keys
        if key in printed
      )
      lines += _compact(cell_lines, line in full)
    if lines:
      title = f"{compared.comparison.name}: {line} by task"
      yield Table(title, ["task", "at", *_models(compared)], lines, names=2)


def _names(comparison: Comparison) -> list[str]:
  return [*(line.name for line in comparison.lines), *comparison.quoted]


def _printed(targets: Targets, key: Key) -> str:
  """Formats a paper's number; doubtful ones get a question mark."""
  if key not in targets.numbers:
    return NOTHING
  doubt = "?" if key.line in targets.doubts else ""
  return f"{targets.numbers[key]:.4g}{doubt}"
