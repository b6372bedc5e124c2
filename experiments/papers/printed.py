"""Reads the papers' numbers.

`tables/` has a file per comparison, with tabs between cells. A line has a
model, a method, what was measured (an average or a task), and a number for each
column of the comparison, or "-"; then the paper's table, or "unknown", and
perhaps why these numbers are misprints or no targets.
"""

import csv
import pathlib

from kvjax.experiments.papers.data_model import Key, Targets

_FOLDER = pathlib.Path(__file__).parent / "tables"
_MISSING = "-"


def places(experiment: str) -> list[str]:
  """Lists the paper's tables that an experiment's numbers are from.

  They are as in the files, also "unknown".
  """
  found: dict[str, None] = {}
  for path in sorted(_FOLDER.glob(f"{experiment}[._]*")):
    with open(path, encoding="utf-8", newline="") as file:
      for row in csv.DictReader(file, dialect="excel-tab", restval=""):
        found[row["table"]] = None
  return list(found)


def read(name: str) -> tuple[Targets, ...]:
  """Reads the numbers of a comparison, a record per model."""
  numbers: dict[str, dict[Key, float]] = {}
  doubts: dict[str, dict[str, str]] = {}
  with open(_FOLDER / f"{name}.tsv", encoding="utf-8", newline="") as file:
    for row in csv.DictReader(file, dialect="excel-tab", restval=""):
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
