"""Formats a run as Markdown and for a terminal."""

from collections.abc import Sequence

import rich.console
import rich.text

from kvjax.experiments.report import formats, wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.means import Summary, means
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.report.tables import tables


def markdown(record: Record, plots: Sequence[str]) -> str:
  """Formats settings, all tables, and links to the plots."""
  return formats.document(
    f"# {formats.escaped(wording.title(record.summary))}",
    formats.escaped(wording.circumstances(record.summary)),
    f"Data: {formats.escaped(wording.data(record.summary))}.",
    formats.escaped(wording.headline(means(record.summary["rows"]))),
    *tables(record),
    *(f"![{name}]({name})" for name in plots),
  )


def terminal(record: Record) -> rich.console.Group:
  """Formats settings and the tables that fit in 80 columns."""
  return framed(record.summary, tables(record, brief=True))


def framed(summary: Summary, shown: Sequence[Table]) -> rich.console.Group:
  """Formats settings above and below tables for a terminal."""
  return rich.console.Group(
    rich.text.Text(wording.title(summary)),
    rich.text.Text(wording.headline(means(summary["rows"]))),
    *shown,
    rich.text.Text(wording.circumstances(summary), style="dim"),
  )
