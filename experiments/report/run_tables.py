"""Formats a run as Markdown and for a terminal."""

from collections.abc import Sequence

import rich.console
import rich.text

from kvjax.experiments.report import formats, wording
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.report.tables import tables


def markdown(record: Record, plots: Sequence[str]) -> str:
  """Formats settings, all tables, and links to the plots."""
  best = wording.headline(record.summary)
  lines = [
    f"# {formats.escaped(wording.title(record.summary))}",
    formats.escaped(wording.circumstances(record.summary)),
    f"Data: {formats.escaped(wording.data(record.summary))}.",
    *([formats.escaped(best)] if best else []),
    *(formats.to_markdown(table).rstrip() for table in tables(record)),
    *(f"![{name}]({name})" for name in plots),
  ]
  return "\n\n".join(lines) + "\n"


def terminal(record: Record) -> rich.console.Group:
  """Formats settings and the tables that fit in 80 columns."""
  return rich.console.Group(
    rich.text.Text(wording.title(record.summary)),
    rich.text.Text(wording.headline(record.summary)),
    *tables(record, brief=True),
    rich.text.Text(wording.circumstances(record.summary), style="dim"),
  )
