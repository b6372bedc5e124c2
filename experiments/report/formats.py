"""Tables for terminals, Markdown and CSV files."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import rich.box
import rich.console
import rich.table
import rich.text
from rich.cells import cell_len

# Spaces between two columns on a terminal.
_GAP = 2
# Maximum width of column names and line names; longer ones are folded.
_WORD, _NAME = 8, 32
_WORDS = re.compile(r"multi|[^_: ]+[_: ]?|[_: ]")
_OPTIONS = re.compile(r"[^: ]+[: ]?|[: ]")
_PARTS_OF_NAMES = re.compile(r"[^_]+_?|_")
# Characters that Markdown interprets within a cell.
_MARKUP = re.compile(r"[|<>&*`\[\]\\]")


class Table(NamedTuple):
  """Texts in rows and columns.

  Attributes:
    title: the title.
    header: names of the columns.
    lines: the cells of each line.
    names: number of leading columns that identify a line.
    least: minimum width of the column of the lines' names.
    named: number of the column of the lines' names, at the left edge.
  """

  title: str
  header: Sequence[str]
  lines: Sequence[Sequence[str]]
  names: int = 1
  least: int = 16
  named: int = 0

  @classmethod
  def of_columns(
    cls, title: str, columns: Mapping[str, Sequence[str]], names: int = 1
  ) -> "Table":
    """Makes a table of the cells of each column by its name."""
    lines = list(zip(*columns.values(), strict=True))
    return cls(title, list(columns), lines, names)

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> Iterator[rich.console.RenderableType]:
    """Yields as many tables as needed to show all columns."""
    if self.title:
      yield rich.text.Text(self.title, style="bold")
    header = [_folded(name, _WORD, _WORDS) for name in self.header]
    widths = [
      _GAP + max(map(_width, cells))
      for cells in zip(header, *self.lines, strict=True)
    ]
    others = sum(widths) - widths[self.named]
    available = options.max_width - 1 - _GAP - others
    available = max(self.least, min(_NAME, available))
    names = [at_options(line[self.named], available) for line in self.lines]
    widths[self.named] = _GAP + max(map(_width, (header[self.named], *names)))
    for columns in _fitting(widths, self.names, options.max_width):
      yield _terminal(self, header, names, columns)


def to_markdown(table: Table, code: bool = False) -> str:
  """Formats the table below its title, which is bold.

  Args:
    table: the table.
    code: whether the lines' names are code, as names of methods are.
  """
  cells = [table.header, *table.lines]
  header, *lines = [[escaped(cell) for cell in line] for line in cells]
  if code:
    for line in lines:
      line[table.named] = f"`{line[table.named]}`"
  text = grid(header, lines, left=[table.named])
  return f"**{escaped(table.title)}**\n\n{text}" if table.title else text


def document(*blocks: str | Table) -> str:
  """Joins paragraphs of Markdown and tables; empty texts are left out."""
  texts = (
    to_markdown(block).rstrip() if isinstance(block, Table) else block
    for block in blocks
  )
  return "\n\n".join(filter(None, texts)) + "\n"


def grid(
  header: Sequence[str],
  lines: Iterable[Sequence[str]],
  left: Sequence[int] = (0,),
) -> str:
  """Formats cells of Markdown as a table.

  Args:
    header: names of the columns.
    lines: the cells.
    left: numbers of the columns that are aligned at the left.
  """
  rule = [":--" if n in left else "--:" for n in range(len(header))]
  rows = (" | ".join(row) for row in (header, rule, *lines))
  return "".join(f"| {row} |\n" for row in rows)


def to_csv(lines: Iterable[Mapping[str, object]]) -> str:
  """Formats one line per record; columns are all names in order."""
  lines = list(lines)
  names = list(dict.fromkeys(name for line in lines for name in line))
  text = io.StringIO()
  writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
  writer.writeheader()
  writer.writerows(lines)
  return text.getvalue()


def escaped(text: str) -> str:
  """Escapes a text for Markdown, in one line."""
  return _MARKUP.sub(r"\\\g<0>", text).replace("\n", " ")


def at_options(name: str, width: int) -> str:
  """Folds a method's name to about a width, broken at its options.

  Longer parts are broken at underscores.
  """
  lines = _folded(name, width, _OPTIONS).split("\n")
  return "\n".join(
    line if len(line) <= width else _folded(line, width, _PARTS_OF_NAMES)
    for line in lines
  )


def _folded(name: str, width: int, parts: re.Pattern[str]) -> str:
  """Folds a name to lines of about a width, broken between parts."""
  lines = [""]
  for part in parts.findall(name):
    if lines[-1] and len(lines[-1] + part.rstrip()) > width:
      lines.append("")
    lines[-1] += part
  return "\n".join(line.rstrip() for line in lines)


def _width(text: str) -> int:
  return max(map(cell_len, text.split("\n")))


def _fitting(
  widths: Sequence[int], names: int, width: int
) -> Iterator[list[int]]:
  """Splits columns into tables that fit, each with the name columns."""
  first = list(range(names))
  chosen = list(first)
  for column in range(names, len(widths)):
    used = sum(widths[other] for other in (*chosen, column))
    if len(chosen) > names and used >= width:
      yield chosen
      chosen = list(first)
    chosen.append(column)
  yield chosen


def _terminal(
  table: Table,
  header: Sequence[str],
  names: Sequence[str],
  columns: Sequence[int],
) -> rich.table.Table:
  """Builds a table; only the first of adjacent lines shows a shared name."""
  shown = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
  )
  for column in columns:
    name = rich.text.Text(header[column])
    if column == table.named:
      shown.add_column(name, overflow="fold")
    else:
      shown.add_column(name, justify="right", no_wrap=True)
  shared = [line[table.named] for line in table.lines]
  grouped = table.names > 1 and len(set(shared)) < len(shared)
  for index, line in enumerate(table.lines):
    cells = [rich.text.Text(line[column]) for column in columns]
    cells[table.named] = rich.text.Text(names[index])
    own = shared[index]
    again = grouped and shared[index - 1 : index] == [own]
    more = grouped and shared[index + 1 : index + 2] == [own]
    if again:
      cells[: table.named + 1] = [rich.text.Text()] * (table.named + 1)
    shown.add_row(*cells, end_section=grouped and not more)
  return shown
