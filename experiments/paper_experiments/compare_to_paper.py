"""Our numbers beside the paper's."""

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

# Scores that differ by less are equal, to a reader of one decimal.
_EQUAL = 0.05

# The candidate of a line in a column; None where it does not run.
Cells = Mapping[tuple[Line, Column], Candidate | None]


class Beside(NamedTuple):
  """A comparison's numbers.

  Attributes:
    comparison: what was compared.
    scale: how.
    averages: over the tasks that were asked, of scores that all rows have; see
      `averages_of`.
    ours: our numbers, of averages and tasks.
    here: what a line in a column kept or looked up here.
  """

  comparison: Comparison
  scale: Scale
  averages: Mapping[str, Average]
  ours: Mapping[Key, float]
  here: Mapping[tuple[str, str], str]


def beside(
  comparison: Comparison, scale: Scale, cells: Cells, rows: Sequence[Row]
) -> Beside:
  """Averages the rows of a summary as the paper does.

  Args:
    comparison: what was compared.
    scale: how.
    cells: which candidate stands where.
    rows: of the summary; averages of scores that older answers are without
      are left out.
  """
  tasks = list(dict.fromkeys(row["task"] for row in rows))
  averages = {
    name: average
    for name, average in averages_of(comparison, tasks).items()
    if all(average.score in ("score", *row["scores"]) for row in rows)
  }
  whats = [*averages.values(), *_alone(averages, tasks)]
  ours, here = {}, {}
  for (line, column), candidate in cells.items():
    place = column.at(scale)
    if candidate is None or place is None:
      continue
    own = [row for row in rows if _matches(row, candidate, place)]
    here[line.name, column.name] = _shown(candidate)
    for what in whats:
      ours[Key(line.name, column.name, what.name)] = mean(what, own)
  return Beside(comparison, scale, averages, ours, here)


def averages_of(
  comparison: Comparison, asked: Sequence[str]
) -> dict[str, Average]:
  """The paper's averages over the tasks that were asked, by the paper's names.

  Of an average none of whose tasks was asked only the headline remains, as the
  mean of all tasks that were.
  """
  found = {}
  for number, average in enumerate(comparison.averages):
    groups = [
      tuple(task for task in group if task in asked) for group in average.groups
    ]
    groups = [group for group in groups if group]
    if not groups and number == 0:
      groups = [tuple(asked)]
    if groups:
      found[average.name] = Average(average.name, tuple(groups), average.score)
  return found


def mean(average: Average, rows: Sequence[Row]) -> float:
  """The mean of the means of its groups, 0 to 100."""

  def score(row: Row) -> float:
    if average.score == "score":
      return row["score"]
    return row["scores"][average.score]

  return statistics.fmean(
    mean_of([row for row in rows if row["task"] in group], score)
    for group in average.groups
  )


def tables(found: Beside) -> list[Table]:
  """A table per average, and one per line whose tasks the paper prints."""
  shown = [_of_average(found, name) for name in found.averages]
  return [*shown, *_by_task(found)]


def orders(found: Beside) -> list[str]:
  """How methods are ordered at each column, here and in the paper: a line.

  The full cache and doubtful numbers are left out. Where all score the same
  here, that is said.
  """
  headline = next(iter(found.averages))
  lines = []
  equal: dict[str, list[str]] = {}
  for column in found.comparison.columns:
    own = {
      line.name: found.ours[key]
      for line in found.comparison.lines
      if line.paper.method != FULL
      and (key := Key(line.name, column.name, headline)) in found.ours
    }
    if len(own) > 1 and max(own.values()) - min(own.values()) < _EQUAL:
      equal.setdefault(f"{max(own.values()):.1f}", []).append(column.name)
      continue
    ranked: dict[str, list[str]] = {}
    for targets in found.comparison.targets:
      theirs = {
        name: targets.numbers[key]
        for name in own
        if (key := Key(name, column.name, headline)) in targets.numbers
        and name not in targets.doubts
      }
      if len(theirs) > 1:
        ours = order({name: own[name] for name in theirs})
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
  """Names from the best to the worst, as in `a > b = c`."""
  ranked = sorted(scores, key=lambda name: -scores[name])
  text = ranked[0]
  for better, name in itertools.pairwise(ranked):
    close = scores[better] - scores[name] < _EQUAL
    text += f" {'=' if close else '>'} {name}"
  return text


def as_data(found: Beside) -> list[dict[str, Any]]:
  """A line per cell, for other programs."""
  keys = dict.fromkeys(found.ours)
  for targets in found.comparison.targets:
    keys |= dict.fromkeys(targets.numbers)
  return [
    {
      "line": key.line,
      "column": key.column,
      "what": key.what,
      "here": found.here.get((key.line, key.column)),
      "ours": found.ours.get(key),
      "paper": {
        targets.model: targets.numbers[key]
        for targets in found.comparison.targets
        if key in targets.numbers
      },
    }
    for key in keys
  ]


def _alone(
  averages: Mapping[str, Average], tasks: Sequence[str]
) -> Iterator[Average]:
  """Each task by itself, where there is more than one."""
  if len(tasks) > 1:
    yield from (Average(t, ((t,),)) for t in tasks if t not in averages)


def _matches(row: Row, candidate: Candidate, place: Place) -> bool:
  return (
    (row["method"], row["budget"]) == (candidate.method, candidate.budget)
    and place.length in (None, row["length"])
    and place.turn in (None, row["turn"])
  )


def _shown(candidate: Candidate) -> str:
  """What it keeps or looks up."""
  return wording.budget(candidate.method, candidate.budget)


def methods(found: Beside) -> str:
  """What the paper's names are here."""
  scale = found.scale
  names = [
    f"{line.name} is {way.method}"
    for line in found.comparison.lines
    if (way := line.at(scale)) is not None
  ]
  return f"{'; '.join(names)}."


def _of_average(found: Beside, name: str) -> Table:
  small = found.scale == "small"
  full = _full(found.comparison)
  lines = []
  for line in _names(found.comparison):
    own = (
      (line, column.name, *_here(found, line, column.name, small), *cells)
      for column in found.comparison.columns
      if set(cells := _cells(found, Key(line, column.name, name))) != {NOTHING}
    )
    lines += _compact(own, line in full)
  header = ["method", "at", *(["here"] if small else []), *_models(found)]
  return Table(_title(found, name), header, lines, names=3 if small else 2)


def _full(comparison: Comparison) -> set[str]:
  """What the full cache is called."""
  return {x.name for x in comparison.lines if x.paper.method == FULL}


def _here(
  found: Beside, line: str, column: str, small: bool
) -> tuple[str, ...]:
  """What a cell is at the small scale; the paper's own is not repeated."""
  return (found.here.get((line, column), NOTHING),) if small else ()


def _cells(found: Beside, key: Key) -> list[str]:
  """Our number and those of the paper's models."""
  ours = series.number(found.ours.get(key))
  return [ours, *(_printed(t, key) for t in found.comparison.targets)]


def _models(found: Beside) -> list[str]:
  return ["ours", *(targets.model for targets in found.comparison.targets)]


def _compact(lines: Iterable[Sequence[str]], full: bool) -> list[Sequence[str]]:
  """Lines that differ in the column alone, once.

  Args:
    lines: what a method comes to, a line per column.
    full: of the full cache, which is the same where it was not asked again.
  """
  lines = list(lines)
  values = [
    {cell for cell in cells if not full or cell != NOTHING} or {NOTHING}
    for cells in zip(*lines, strict=True)
  ]
  names, _, *others = values or [set(), set()]
  if len(lines) > 1 and all(len(own) == 1 for own in (names, *others)):
    return [(*names, "all", *(own.pop() for own in others))]
  return lines


def _title(found: Beside, name: str) -> str:
  """The average, with what of it was asked."""
  wanted = next(a for a in found.comparison.averages if a.name == name).tasks
  asked = found.averages[name].tasks
  title = f"{found.comparison.name}: {name}"
  if set(asked) == set(wanted):
    return title
  if set(asked) <= set(wanted):
    return f"{title} (ours: {len(asked)} of {len(wanted)} tasks)"
  return f"{title} (ours: mean of {', '.join(asked)})"


def _by_task(found: Beside) -> Iterator[Table]:
  """Lines whose tasks the paper prints and we have asked."""
  asked = {key.what for key in found.ours} - set(found.averages)
  tasks = [task for task in found.comparison.paper.tasks if task in asked]
  printed = {
    key for targets in found.comparison.targets for key in targets.numbers
  }
  full = _full(found.comparison)
  for line in _names(found.comparison):
    lines: list[Sequence[str]] = []
    for task in tasks:
      keys = [Key(line, c.name, task) for c in found.comparison.columns]
      own = (
        (task, key.column, *_cells(found, key))
        for key in keys
        if key in printed
      )
      lines += _compact(own, line in full)
    if lines:
      title = f"{found.comparison.name}: {line} by task"
      yield Table(title, ["task", "at", *_models(found)], lines, names=2)


def _names(comparison: Comparison) -> list[str]:
  return [*(line.name for line in comparison.lines), *comparison.quoted]


def _printed(targets: Targets, key: Key) -> str:
  """As the paper has it; what is doubtful gets a question mark."""
  if key not in targets.numbers:
    return NOTHING
  doubt = "?" if key.line in targets.doubts else ""
  return f"{targets.numbers[key]:.4g}{doubt}"
