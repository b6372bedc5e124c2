"""A table, and how terminals, Markdown and CSV files show it."""

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

# Between two columns of a terminal's table.
_GAP = 2
# Longer names of columns and lines are folded.
_WORD, _NAME = 8, 32
_WORDS = re.compile(r"multi|[^_: ]+[_: ]?|[_: ]")
_OPTIONS = re.compile(r"[^: ]+[: ]?|[: ]")
# What Markdown takes for markup within a cell.
_MARKUP = re.compile(r"[|<>&*`\[\]\\]")


class Table(NamedTuple):
  """Texts in rows and columns.

  Attributes:
    title: what it is about.
    header: names of the columns.
    lines: a text for each column.
    names: how many of the first columns say what a line is about.
    least: letters of the first column that are not broken.
  """

  title: str
  header: Sequence[str]
  lines: Sequence[Sequence[str]]
  names: int = 1
  least: int = 16

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> Iterator[rich.console.RenderableType]:
    """As many tables as it takes to show all columns, one below another."""
    if self.title:
      yield rich.text.Text(self.title, style="bold")
    header = [_folded(name, _WORD, _WORDS) for name in self.header]
    widths = [
      _GAP + max(map(_width, cells))
      for cells in zip(header, *self.lines, strict=True)
    ]
    room = options.max_width - 1 - _GAP - sum(widths[1:])
    room = max(self.least, min(_NAME, room))
    names = [at_options(line[0], room) for line in self.lines]
    widths[0] = _GAP + max(map(_width, (header[0], *names)))
    for columns in _fitting(widths, self.names, options.max_width):
      yield _terminal(self, header, names, columns)


def to_markdown(table: Table) -> str:
  """The table, below its title in bold if it has one."""
  rule = [":--"] + ["--:"] * (len(table.header) - 1)
  cells = [table.header, *table.lines]
  header, *lines = [[escaped(cell) for cell in line] for line in cells]
  text = "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))
  return f"**{escaped(table.title)}**\n\n{text}" if table.title else text


def to_csv(lines: Iterable[Mapping[str, object]]) -> str:
  """One line each; columns are all names that occur, in order."""
  lines = list(lines)
  names = list(dict.fromkeys(name for line in lines for name in line))
  text = io.StringIO()
  writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
  writer.writeheader()
  writer.writerows(lines)
  return text.getvalue()


def escaped(text: str) -> str:
  """A text that Markdown shows as it is, in one line."""
  return _MARKUP.sub(r"\\\g<0>", text).replace("\n", " ")


def at_options(name: str, width: int) -> str:
  """A method's name in lines of about some width, broken at its options."""
  return _folded(name, width, _OPTIONS)


def _folded(name: str, width: int, parts: re.Pattern[str]) -> str:
  """A name in lines of about some width, each of one or more of its parts."""
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
  """The columns of tables that fit: names, and as many others as there can."""
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
  """Lines of one name stand together, and only the first shows it."""
  shown = rich.table.Table(
    box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
  )
  for column in columns:
    name = rich.text.Text(header[column])
    if column == 0:
      shown.add_column(name, overflow="fold")
    else:
      shown.add_column(name, justify="right", no_wrap=True)
  firsts = [line[0] for line in table.lines]
  grouped = table.names > 1 and len(set(firsts)) < len(firsts)
  for index, line in enumerate(table.lines):
    cells = [rich.text.Text(line[column]) for column in columns]
    own = firsts[index]
    again = grouped and firsts[index - 1 : index] == [own]
    more = grouped and firsts[index + 1 : index + 2] == [own]
    cells[0] = rich.text.Text("" if again else names[index])
    shown.add_row(*cells, end_section=grouped and not more)
  return shown
