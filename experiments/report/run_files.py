"""Reads runs from disk: a summary and its answers."""

import operator
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.report.means import Row, Summary, Timed, means, ranked
from kvjax.experiments.run import typed_records
from kvjax.experiments.run.line_files import parse_lines
from kvjax.experiments.run.results import Answer, Settings
from kvjax.files import read_text

SUMMARY = "summary.json"
SAMPLES = "samples.jsonl"

_Kinds = Mapping[str, Any]
_SETTINGS: _Kinds = {
  **get_type_hints(Settings),
  **dict.fromkeys(("decoding", "device"), str),
  "versions": dict[str, str],
  "seconds": dict[str, float],
  "rows": list[Any],
}
# Rows also have the fields of `Timed`.
_ROW: _Kinds = {
  **dict.fromkeys(("method", "options", "budget", "task"), str),
  **dict.fromkeys(("length", "samples"), int),
  "score": float,
  "interval": list[float],
  "scores": dict[str, float],
  "depth": float | None,
  "turn": int | None,
}
# The fields that a row shares with its answers.
_KEY = ("method", "options", "budget", "task", "length", "depth", "turn")


class Record(NamedTuple):
  """A run.

  Attributes:
    folder: folder of the run.
    summary: content of `summary.json`.
    answers: the answers of `samples.jsonl` that the summary averages.
  """

  folder: pathlib.Path
  summary: Summary
  answers: Sequence[Answer] = ()

  def select(self, chosen: Callable[[Row], bool]) -> "Record":
    """Selects rows and answers by their fields."""
    rows = [row for row in self.summary["rows"] if chosen(row)]
    answers = [answer for answer in self.answers if chosen(vars(answer))]
    return Record(self.folder, {**self.summary, "rows": rows}, answers)

  def at(self, **fields: object) -> "Record":
    """Selects rows and answers by field values, as in `length=1024`."""
    return self.select(
      lambda own: all(own[name] == value for name, value in fields.items())
    )

  def of_tasks(self, tasks: Collection[str]) -> "Record":
    """Selects rows and answers of some tasks."""
    return self.select(lambda own: own["task"] in tasks)

  @property
  def ranked(self) -> "Record":
    """The same run with its rows sorted by method; see `means.ranked`."""
    rows = self.summary["rows"]
    order = [mean.method for mean in ranked(means(rows))]
    rows = sorted(rows, key=lambda row: order.index(row["method"]))
    return self._replace(summary={**self.summary, "rows": rows})

  def values(self, name: str) -> list[Any]:
    """Returns the distinct values of a field of the rows, in order."""
    return list(dict.fromkeys(row[name] for row in self.summary["rows"]))


def find(directories: Sequence[pathlib.Path]) -> list[Record]:
  """Finds the runs in and below directories, each once.

  Raises:
    InputError: a directory has no run or a malformed one.
  """
  folders: dict[pathlib.Path, pathlib.Path] = {}
  for directory in directories:
    folders_found = list(_folders(directory))
    if not folders_found:
      raise InputError(
        f"{directory} holds no run; a run's folder has {SUMMARY} and {SAMPLES}."
      )
    folders |= {folder.resolve(): folder for folder in folders_found}
  return [read(folder) for folder in folders.values()]


def find_one(directory: pathlib.Path) -> Record:
  """Finds the only run in and below a directory.

  Raises:
    InputError: see `find`, or there are several.
  """
  runs = find([directory])
  if len(runs) > 1:
    names = ", ".join(run.folder.name for run in runs)
    raise InputError(
      f"{directory} holds {len(runs)} runs, whose settings differ: {names}; "
      "choose another --output, or remove those of other settings."
    )
  return runs[0]


def unfinished(directories: Sequence[pathlib.Path]) -> list[pathlib.Path]:
  """Finds folders in and below directories with answers but no summary."""
  without_summary = {
    path.parent.resolve(): path.parent
    for directory in directories
    for path in sorted(directory.rglob(SAMPLES))
    if not (path.parent / SUMMARY).is_file()
  }
  return list(without_summary.values())


def read(folder: pathlib.Path) -> Record:
  """Reads a run.

  Raises:
    InputError: a file cannot be read or is malformed.
  """
  summary = _summary(folder / SUMMARY)
  answers = _answers(folder / SAMPLES)
  return Record(folder, summary, _averaged(summary["rows"], answers))


def notes(folder: pathlib.Path) -> dict[str, str]:
  """Returns what a run's summary says about samples, for one that adds some.

  It is empty if there is no summary yet, or none that can be read.
  """
  try:
    return _summary(folder / SUMMARY).get("about", {})
  except InputError:
    return {}


def _folders(directory: pathlib.Path) -> Iterator[pathlib.Path]:
  for path in sorted(directory.rglob(SUMMARY)):
    if (path.parent / SAMPLES).is_file():
      yield path.parent


def _summary(path: pathlib.Path) -> dict[str, Any]:
  text = read_text(path)
  try:
    summary = files.parse_json(text)
    typed_records.check(summary, _SETTINGS)
    typed_records.check({"about": {}} | summary, {"about": dict[str, str]})
    if not summary["rows"]:
      raise ValueError("it has no rows")
    for row in summary["rows"]:
      typed_records.check(row, _ROW)
      typed_records.make(Timed, row)
      low, high = row["interval"]
      if row["samples"] < 1 or row["context_tokens"] <= 0 or low > high:
        raise ValueError(f"the numbers of {row['task']} cannot be")
  except ValueError as error:
    raise InputError(
      f"{path} is not a run's summary: {error}; remove it or run it again."
    ) from error
  return dict(summary)


def _answers(path: pathlib.Path) -> list[Answer]:
  """Reads answers; skips an incomplete last line of a killed run."""
  text = read_text(path)
  lines = text[: text.rfind("\n") + 1].split("\n")[:-1]
  return parse_lines(lines, Answer, path, "answer")


def _averaged(rows: Sequence[Row], answers: Sequence[Answer]) -> list[Answer]:
  """Selects the answers behind the rows; a folder may contain others."""
  of_row, of_answer = operator.itemgetter(*_KEY), operator.attrgetter(*_KEY)
  groups: dict[object, list[Answer]] = {}
  for answer in answers:
    groups.setdefault(of_answer(answer), []).append(answer)
  chosen: list[Answer] = []
  for row in rows:
    group = sorted(groups.get(of_row(row), ()), key=lambda a: a.sample)
    chosen += group[: row["samples"]]
  return chosen
