"""Parses tables of numbers as papers print them."""

import itertools
from collections.abc import Sequence

from kvjax.experiments.papers.records import Key


def across(text: str, columns: Sequence[str], what: str) -> dict[Key, float]:
  """Parses a table with a line per method and a number per column.

  Args:
    text: lines such as `SnapKV | 39.60 45.18`, with - for missing numbers.
    columns: names of the columns.
    what: the average or task of the numbers.
  """
  return {
    Key(line, column, what): number
    for line, numbers in _lines(text)
    for column, number in _paired(columns, numbers)
  }


def by_task(text: str, line: str, whats: Sequence[str]) -> dict[Key, float]:
  """Parses a method's table with a line per column, a number per task."""
  return {
    Key(line, column, what): number
    for column, numbers in _lines(text)
    for what, number in _paired(whats, numbers)
  }


def by_model(
  text: str, full: str, methods: Sequence[str], columns: Sequence[str]
) -> list[dict[Key, float]]:
  """Parses a table of several models with a line per task.

  Args:
    text: lines such as `trec | 73.00 44.00 55.00 72.50 41.00 53.00`: for each
      model, the number of the full cache and then each method's of every
      column.
    full: name of the full cache.
    methods: names of the methods.
    columns: names of the columns.

  Returns:
    The numbers of each model; the full cache's are in every column.
  """
  places = [(full, column) for column in columns]
  places += itertools.product(methods, columns)
  width = 1 + len(methods) * len(columns)
  models: list[dict[Key, float]] = []
  for task, numbers in _lines(text):
    for model, start in enumerate(range(0, len(numbers), width)):
      first, *others = numbers[start : start + width]
      if model == len(models):
        models.append({})
      cells = zip(places, [first] * len(columns) + others, strict=True)
      models[model] |= {
        Key(*place, task): float(number)
        for place, number in cells
        if number != "-"
      }
  return models


def scaled(numbers: dict[Key, float], factor: float) -> dict[Key, float]:
  """Converts shares to percent, rounded to two places."""
  return {key: round(value * factor, 2) for key, value in numbers.items()}


def _lines(text: str) -> list[tuple[str, list[str]]]:
  """Splits names and numbers; a line without a name continues the last one."""
  named_lines: list[tuple[str, list[str]]] = []
  for row in text.strip().splitlines():
    name, bar, numbers = row.rpartition("|")
    if bar:
      named_lines.append((name.strip(), []))
    named_lines[-1][1].extend(numbers.split())
  return named_lines


def _paired(
  names: Sequence[str], numbers: Sequence[str]
) -> list[tuple[str, float]]:
  pairs = zip(names, numbers, strict=True)
  return [(name, float(text)) for name, text in pairs if text != "-"]
