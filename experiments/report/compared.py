"""The table of a comparison: a few tasks at one length, side by side."""

import rich.console
import rich.text

from kvjax.experiments.report import formats, tables, wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.means import (
  Summary,
  complete,
  means,
  ranked,
  reads_less,
)


def markdown(summary: Summary) -> str:
  """Formats the table with its title and settings."""
  table = formats.to_markdown(_table(summary))
  about = wording.circumstances(summary)
  best = formats.escaped(wording.headline(summary))
  parts = (f"**{wording.title(summary)}**", best, table.rstrip(), about)
  return "\n\n".join(filter(None, parts)) + "\n"


def terminal(summary: Summary) -> rich.console.Group:
  """Formats the table for a terminal of 80 columns."""
  about = rich.text.Text(wording.circumstances(summary), style="dim")
  title = rich.text.Text(wording.title(summary))
  best = rich.text.Text(wording.headline(summary))
  return rich.console.Group(title, best, _table(summary), about)


def _table(summary: Summary) -> Table:
  averages = ranked(means(summary["rows"]))
  comparable = complete(averages)
  tasks = list(dict.fromkeys(row["task"] for row in summary["rows"]))
  columns = {
    "method": [mean.method for mean in averages],
    "budget": [wording.reached(mean) for mean in averages],
    **{
      task.removeprefix("niah_"): [
        _score(mean.tasks.get(task)) for mean in averages
      ]
      for task in tasks
    },
    "mean": [
      _score(mean.score if mean in comparable else None) for mean in averages
    ],
    "kept": [f"{mean.kept_tokens:.0f}" for mean in averages],
  }
  if reads_less(averages):
    columns["read"] = [f"{mean.read_tokens:.0f}" for mean in averages]
  columns |= tables.of_bytes(averages)
  lines = list(zip(*columns.values(), strict=True))
  return Table("", list(columns), lines, names=2)


def _score(score: float | None) -> str:
  return "–" if score is None else f"{score:.1f}"
