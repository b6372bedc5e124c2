"""Reads the papers' numbers.

`tables/` has a file per comparison, with tabs between cells. A line has a
model, a method, what was measured (an average or a task), and a number for each
column of the comparison, or "-"; then the paper's table, or "unknown", and
perhaps why these numbers are misprints or no targets.
"""

import csv
import pathlib
from collections.abc import Iterator

from kvjax.experiments.papers.data_model import Key, Targets

_FOLDER = pathlib.Path(__file__).parent / "tables"
_MISSING = "-"


def places(experiment: str) -> list[str]:
  """Lists the paper's tables that an experiment's numbers are from.

  They are as in the files, also "unknown".
  """
  paths = sorted(_FOLDER.glob(f"{experiment}[._]*"))
  return list(dict.fromkeys(r["table"] for p in paths for r in _rows(p)))


def read(name: str) -> tuple[Targets, ...]:
  """Reads the numbers of a comparison, a record per model."""
  numbers: dict[str, dict[Key, float]] = {}
  doubts: dict[str, dict[str, str]] = {}
  for row in _rows(_FOLDER / f"{name}.tsv"):
    model, method, measure = map(row.pop, ("model", "method", "measure"))
    del row["table"]
    doubt = row.pop("doubt", "")
    doubts.setdefault(model, {}).update({method: doubt} if doubt else {})
    numbers.setdefault(model, {}).update(
      (Key(method, column, measure), float(number))
      for column, number in row.items()
      if number != _MISSING
    )
  return tuple(
    Targets(model, numbers[model], doubts[model]) for model in numbers
  )


def _rows(path: pathlib.Path) -> Iterator[dict[str, str]]:
  with open(path, encoding="utf-8", newline="") as file:
    yield from csv.DictReader(file, dialect="excel-tab", restval="")
