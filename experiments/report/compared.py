"""The tables of a comparison: a few tasks side by side, at each length."""

import functools

import rich.console

from kvjax.experiments.report import (
  formats,
  run_tables,
  series,
  tables,
  wording,
)
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.means import complete, means, ranked, reads_less
from kvjax.experiments.report.run_files import Record


def markdown(record: Record) -> str:
  """Formats settings and all tables."""
  summary = record.summary
  return formats.document(
    f"**{wording.title(summary)}**",
    formats.escaped(wording.headline(means(summary["rows"]))),
    *tables.of_parts(record, _tables),
    wording.circumstances(summary),
  )


def terminal(record: Record) -> rich.console.Group:
  """Formats settings and tables for a terminal of 80 columns."""
  brief = functools.partial(_tables, brief=True)
  return run_tables.framed(record.summary, tables.of_parts(record, brief))


def _tables(part: Record, brief: bool = False) -> list[Table]:
  """Builds a table by budget, if there are several, and one with details.

  In brief, the details are those of the middle budget.
  """
  if len(tables.budget_names(part)) == 1:
    return [_details(part)]
  shown = tables.at_middle(part) if brief else part
  return [tables.by_budget(part), _details(shown)]


def _details(record: Record) -> Table:
  """Builds a table with a line per method and budget: tasks, tokens, bytes."""
  rows = record.summary["rows"]
  averages = ranked(means(rows))
  comparable = complete(averages)
  tasks = list(dict.fromkeys(row["task"] for row in rows))
  columns = {
    "method": [mean.method for mean in averages],
    "budget": [wording.reached(mean) for mean in averages],
    **{
      task.removeprefix("niah_"): [
        series.number(mean.tasks.get(task)) for mean in averages
      ]
      for task in tasks
    },
    "mean": [
      series.number(mean.score if mean in comparable else None)
      for mean in averages
    ],
    "kept": [f"{mean.kept_tokens:.0f}" for mean in averages],
  }
  if reads_less(averages):
    columns["read"] = [f"{mean.read_tokens:.0f}" for mean in averages]
  columns |= tables.of_bytes(averages)
  title = (
    f"{wording.score_name(record.summary)} by task, "
    f"n = {min(mean.samples for mean in averages)}; tokens that a head keeps; "
    "size of a context's cache"
  )
  return Table.of_columns(title, columns, names=2)
