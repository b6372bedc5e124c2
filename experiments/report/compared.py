"""The table of a comparison: a few tasks at one length, side by side."""

import rich.console
import rich.text

from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table, to_markdown
from kvjax.experiments.report.means import Summary, complete, means, reads_less


def markdown(summary: Summary) -> str:
  """Formats the table with its title and settings."""
  table = to_markdown(_table(summary))
  about = wording.circumstances(summary)
  return f"**{wording.title(summary)}**\n\n{table}\n{about}\n"


def terminal(summary: Summary) -> rich.console.Group:
  """Formats the table for a terminal of 80 columns."""
  about = rich.text.Text(wording.circumstances(summary), style="dim")
  title = rich.text.Text(wording.title(summary))
  return rich.console.Group(title, _table(summary), about)


def _table(summary: Summary) -> Table:
  averages = means(summary["rows"])
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
  columns["KiB"] = [f"{mean.cache_bytes / 1024:.0f}" for mean in averages]
  if any(mean.host_bytes for mean in averages):
    columns["on host"] = [f"{mean.host_bytes / 1024:.0f}" for mean in averages]
  lines = list(zip(*columns.values(), strict=True))
  return Table("", list(columns), lines, names=2)


def _score(score: float | None) -> str:
  return "–" if score is None else f"{score:.1f}"
