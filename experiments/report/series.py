"""Tables of scores, or tokens kept, by length or turn."""

import statistics
from collections.abc import Callable, Mapping

from kvjax.experiments.benchmarks.registry import presentation
from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.means import (
  Name,
  Row,
  comparable,
  grouped,
  mean_of,
  other_score,
  score,
)
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.run.candidates import FULL

_Value = Callable[[Row], float]
# Runs with a full cache have this score besides those of the benchmark.
_SAME = "same_first_token"


def by_length(record: Record) -> list[Table]:
  """Builds a table per score, with a column per length."""
  return [
    _across(record, "length", f"{name} by length", value)
    for name, value in _scores(record).items()
  ]


def weighted_by_length(record: Record) -> list[Table]:
  """Builds a table of the benchmark's averages over lengths, if it has any.

  It covers tasks that ran at every length, and methods and budgets that ran all
  of these. It is empty for a single length.
  """
  lengths = sorted(record.values("length"))
  averages = presentation(record.summary["benchmark"]).averages_of_lengths
  ran = {(row["task"], row["length"]) for row in record.summary["rows"]}
  tasks = [
    task
    for task in record.values("task")
    if all((task, length) in ran for length in lengths)
  ]
  if averages is None or len(lengths) == 1 or not tasks:
    return []
  header: list[str] = []
  cells = {}
  for name, rows in grouped(record.summary["rows"]).items():
    rows = [row for row in rows if row["task"] in tasks]
    own = {(row["task"], row["length"]) for row in rows}
    if len(own) < len(tasks) * len(lengths):
      continue
    weighted = averages(
      {
        length: mean_of([row for row in rows if row["length"] == length], score)
        for length in lengths
      }
    )
    header, cells[name] = list(weighted), list(weighted.values())
  if not cells:
    return []
  title = f"weighted by length, {wording.averaged(tasks)}"
  return [_table(title, header, cells)]


def by_turn(record: Record) -> list[Table]:
  """Builds tables with a column per turn: scores, and tokens kept if they vary.

  All turns have equal weight in the mean. The result is empty without turns.
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
  """Builds a table with a line per method and budget, a column per score.

  Lines over other tasks than most are dashes; see `means.complete`. The result
  is empty if the benchmark has only its main score.
  """
  rows = record.summary["rows"]
  values = _scores(record)
  if set(values) <= {wording.score_name(record.summary), _named(_SAME)}:
    return []
  shown = comparable(rows)
  cells = {
    name: [
      number(mean_of(own, value) if name in shown else None)
      for value in values.values()
    ]
    for name, own in grouped(rows).items()
  }
  return [_table("all scores", list(values), cells)]


def number(value: float | None) -> str:
  """Formats a score for a table."""
  return wording.NOTHING if value is None else f"{value:.1f}"


def _scores(record: Record) -> dict[str, _Value]:
  """Returns accessors for the scores that all rows have, the main one first."""
  rows = record.summary["rows"]
  accessors: dict[str, _Value] = {wording.score_name(record.summary): score}
  for name in rows[0]["scores"]:
    if all(name in row["scores"] for row in rows):
      accessors[_named(name)] = other_score(name)
  return accessors


def _named(name: str) -> str:
  return name.replace("_", " ")


def _kept(row: Row) -> float:
  return row["kept_tokens"]


def _across(record: Record, field: str, title: str, value: _Value) -> Table:
  """Builds a table with a column per value of a field, and their plain mean.

  A line that lacks a column has no mean, and one that lacks tasks of a column,
  or has others, a dash there.
  """
  columns = sorted(record.values(field))
  cells: dict[Name, dict[object, float]] = {}
  for column in columns:
    rows = record.at(**{field: column}).summary["rows"]
    shown = comparable(rows)
    for name, own in grouped(rows).items():
      by_column = cells.setdefault(name, {})
      if name in shown:
        by_column[column] = mean_of(own, value)
  # Turns count from 0, their names from 1.
  header = [str(column + (field == "turn")) for column in columns]
  lines = {}
  for name, by_column in cells.items():
    is_whole = len(by_column) == len(columns)
    mean = statistics.fmean(by_column.values()) if is_whole else None
    values = [*map(by_column.get, columns), mean]
    lines[name] = [number(each) for each in values]
  return _table(title, [*header, "mean"], lines)


def _table(
  title: str, header: list[str], cells: Mapping[Name, list[str]]
) -> Table:
  """Builds a table; a budget that all lines share moves to the title."""
  budgets = {wording.budget(*name) for name in cells if name[0] != FULL}
  if len(budgets) == 1:
    lines = [[method, *texts] for (method, _), texts in cells.items()]
    return Table(f"{title} at {budgets.pop()}", ["method", *header], lines)
  lines = [
    [name[0], wording.budget(*name), *texts] for name, texts in cells.items()
  ]
  return Table(title, ["method", "budget", *header], lines, names=2)
