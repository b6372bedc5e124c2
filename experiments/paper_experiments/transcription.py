"""Tables of numbers as papers print them."""

from collections.abc import Sequence

from kvjax.experiments.paper_experiments.records import Key


def across(text: str, columns: Sequence[str], what: str) -> dict[Key, float]:
  """A line per method, a number per column.

  Args:
    text: lines such as `SnapKV | 39.60 45.18`, with - for what is missing.
    columns: what the numbers of a line belong to.
    what: the average or the task that they are.
  """
  return {
    Key(line, column, what): number
    for line, numbers in _lines(text)
    for column, number in _paired(columns, numbers)
  }


def by_task(text: str, line: str, whats: Sequence[str]) -> dict[Key, float]:
  """One method: a line per column, a number per task or average."""
  return {
    Key(line, column, what): number
    for column, numbers in _lines(text)
    for what, number in _paired(whats, numbers)
  }


def scaled(numbers: dict[Key, float], factor: float) -> dict[Key, float]:
  """Numbers that are printed as shares, in per cent; to two places."""
  return {key: round(value * factor, 2) for key, value in numbers.items()}


def _lines(text: str) -> list[tuple[str, list[str]]]:
  """Names and numbers; a line without a name goes on with the one before."""
  found: list[tuple[str, list[str]]] = []
  for row in text.strip().splitlines():
    name, bar, numbers = row.rpartition("|")
    if bar:
      found.append((name.strip(), []))
    found[-1][1].extend(numbers.split())
  return found


def _paired(
  names: Sequence[str], numbers: Sequence[str]
) -> list[tuple[str, float]]:
  pairs = zip(names, numbers, strict=True)
  return [(name, float(text)) for name, text in pairs if text != "-"]
