"""The table of a benchmark, for a terminal and for a page in docs/."""

import pathlib
import textwrap
from collections.abc import Mapping, Sequence

import rich.console

from kvjax.experiments.report import formats, wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import environment, outputs

# Columns of the pages.
_WIDTH = 80


def show(
  folder: pathlib.Path,
  table: Table,
  about: str,
  code: bool = False,
  peers: Mapping[str, str] | None = None,
) -> None:
  """Prints a table, and writes table.md, which a page may hold as it is.

  Args:
    folder: folder of the file.
    table: the table.
    about: what was measured, and how; the versions of packages follow.
    code: see `formats.to_markdown`.
    peers: versions of other libraries that were measured.
  """
  versions = {**environment.versions(), **(peers or {})}
  about = f"{about}; {wording.versions(versions)}."
  outputs.write_text(folder / "table.md", markdown(table, about, code))
  console = rich.console.Console(highlight=False)
  console.print(table, about, markup=False)


def markdown(table: Table, about: str, code: bool = False) -> str:
  """Formats a table with a sentence below it, in lines as long as a page's."""
  below = textwrap.fill(about, _WIDTH, break_on_hyphens=False)
  return f"{formats.to_markdown(table, code)}\n{below}\n"


def speeds(bytes_per_second: Sequence[float]) -> str:
  """Formats the slowest and the fastest speed: `4.4 to 4.6 GB/s`."""
  ends = (min(bytes_per_second), max(bytes_per_second))
  return f"{' to '.join(dict.fromkeys(f'{x / 1e9:,.1f}' for x in ends))} GB/s"
