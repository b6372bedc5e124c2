"""Tables that follow a score, or what is kept, along the rows of a run."""

import functools
import statistics
from collections.abc import Callable, Mapping

from kvjax.experiments.benchmarks.ruler_averages import ENOUGH, averages
from kvjax.experiments.candidates import FULL
from kvjax.experiments.reporting import wording
from kvjax.experiments.reporting.formats import Table
from kvjax.experiments.reporting.means import Name, Row, grouped, mean_of, score
from kvjax.experiments.reporting.records import Record

_Value = Callable[[Row], float]
# Every run with a full cache has it, beside the scores of its benchmark.
_SAME = "same_first_token"


def by_length(record: Record) -> list[Table]:
  """A table per score: a line per method and budget, a column per length."""
  return [
    _across(record, "length", f"{name} by length", value)
    for name, value in _scores(record).items()
  ]


def weighted_by_length(record: Record) -> list[Table]:
  """RULER's two weighted means over lengths, and the effective length.

  Of the tasks that were asked at every length, and with a line per method and
  budget that has them all. Empty for other benchmarks, and for one length.
  """
  lengths = sorted(record.values("length"))
  if record.summary["benchmark"] != "ruler" or len(lengths) == 1:
    return []
  at = {length: record.at(length=length) for length in lengths}
  tasks = [
    task
    for task in record.values("task")
    if all(task in part.values("task") for part in at.values())
  ]
  whole = {(task, length) for task in tasks for length in lengths}
  cells = {}
  for name, rows in grouped(record.summary["rows"]).items():
    own = [row for row in rows if row["task"] in tasks]
    if not whole or {(row["task"], row["length"]) for row in own} != whole:
      continue
    found = averages(
      {
        length: mean_of([row for row in own if row["length"] == length], score)
        for length in lengths
      }
    )
    longest = str(found.effective or f"< {lengths[0]}")
    cells[name] = [number(found.rising), number(found.falling), longest]
  if not cells:
    return []
  title = f"weighted by length, {wording.averaged(tasks)}"
  header = ["rising", "falling", f"effective length (≥ {ENOUGH})"]
  return [_table(title, header, cells)]


def by_turn(record: Record) -> list[Table]:
  """A column per turn of a conversation: scores, and tokens kept if they vary.

  The mean counts every turn alike. Empty without turns.
  """
  if len(record.values("turn")) == 1:
    return []
  tables = [_across(record, "turn", "score by turn", score)]
  rows = record.summary["rows"]
  kept = {(row["method"], row["budget"], _kept(row)) for row in rows}
  if len(kept) > len(grouped(rows)):
    tables.append(_across(record, "turn", "tokens kept by turn", _kept))
  return tables


def other_scores(record: Record) -> list[Table]:
  """A line per method and budget, a column for each score.

  Empty where no benchmark has other scores than its main one.
  """
  values = _scores(record)
  if set(values) <= {wording.score_name(record.summary), _named(_SAME)}:
    return []
  cells = {
    name: [number(mean_of(rows, value)) for value in values.values()]
    for name, rows in grouped(record.summary["rows"]).items()
  }
  return [_table("all scores", list(values), cells)]


def number(value: float | None) -> str:
  """A score in a table."""
  return wording.NOTHING if value is None else f"{value:.1f}"


def _scores(record: Record) -> dict[str, _Value]:
  """How scores that all rows have are read off one; the main one first."""
  rows = record.summary["rows"]
  found: dict[str, _Value] = {wording.score_name(record.summary): score}
  for name in rows[0]["scores"]:
    if all(name in row["scores"] for row in rows):
      found[_named(name)] = functools.partial(_other, name)
  return found


def _named(name: str) -> str:
  return name.replace("_", " ")


def _other(name: str, row: Row) -> float:
  return row["scores"][name]


def _kept(row: Row) -> float:
  return row["kept_tokens"]


def _across(record: Record, field: str, title: str, value: _Value) -> Table:
  """A column for each value of a field, and the mean that counts all alike."""
  columns = sorted(record.values(field))
  cells: dict[Name, dict[object, float]] = {}
  for column in columns:
    own = grouped(record.at(**{field: column}).summary["rows"])
    for name, rows in own.items():
      cells.setdefault(name, {})[column] = mean_of(rows, value)
  # Turns are counted from 0 and named from 1.
  header = [str(column + (field == "turn")) for column in columns]
  lines = {
    name: [
      *(number(own.get(column)) for column in columns),
      number(statistics.fmean(own.values())),
    ]
    for name, own in cells.items()
  }
  return _table(title, [*header, "mean"], lines)


def _table(
  title: str, header: list[str], cells: Mapping[Name, list[str]]
) -> Table:
  """A line per method and budget; one budget for all goes into the title."""
  budgets = {wording.budget(*name) for name in cells if name[0] != FULL}
  if len(budgets) == 1:
    lines = [[method, *own] for (method, _), own in cells.items()]
    return Table(f"{title} at {budgets.pop()}", ["method", *header], lines)
  lines = [
    [name[0], wording.budget(*name), *own] for name, own in cells.items()
  ]
  return Table(title, ["method", "budget", *header], lines, names=2)
