"""Reads rows of data files with the library `datasets`.

The formats are JSON, JSON lines, Parquet and Arrow, and JSON also in a zip.
Arrow files are those of `datasets` itself: its cache and the output of
`save_to_disk`. Rows are streamed: nothing is converted, and only the requested
rows are read.
"""

import dataclasses
import functools
import glob
import os
import pathlib
import types
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.metrics.libraries import library

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")

# Metadata files of `datasets` and the hub.
_ABOUT = (
  "dataset_dict.json",
  "dataset_info.json",
  "dataset_infos.json",
  "state.json",
)


def below(path: pathlib.Path) -> list[pathlib.Path]:
  """Lists the file, or all files in the folder, sorted by name.

  Raises:
    InputError: the path does not exist.
  """
  if not os.path.exists(path):
    raise InputError(f"There is no file or folder {str(path)[:200]}.")
  return sorted(path.rglob("*")) if path.is_dir() else [path]


def has_rows(file: pathlib.Path) -> bool:
  """Returns whether a file has rows; excludes caches of `datasets`."""
  return (
    file.suffix in SUFFIXES
    and file.name not in _ABOUT
    and not file.name.startswith("cache-")
  )


class Row(NamedTuple):
  """A row of a file.

  Attributes:
    place: its location, as in "Line 3 of a.jsonl".
    fields: values by name.
  """

  place: str
  fields: Mapping[str, Any]

  def text(self, name: str) -> str:
    """Returns a text field.

    Raises:
      InputError: the field is missing or has another type.
    """
    value = self.fields.get(name)
    if not isinstance(value, str):
      raise InputError(f"{self.place} needs a text under {name!r}.")
    return value

  def texts(self, name: str) -> tuple[str, ...]:
    """Returns a field with a nonempty list of texts, or a single text.

    Raises:
      InputError: the field is missing or has another type.
    """
    value = self.fields.get(name)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
      raise InputError(f"{self.place} needs a list of texts under {name!r}.")
    if not all(isinstance(item, str) for item in values):
      raise InputError(f"{self.place} has under {name!r} what is no text.")
    return tuple(values)

  def number(self, name: str) -> int:
    """Returns an integer field.

    Raises:
      InputError: the field is missing or has another type.
    """
    value = self.fields.get(name)
    if type(value) is not int:
      raise InputError(f"{self.place} needs a whole number under {name!r}.")
    return value


@dataclasses.dataclass(frozen=True, order=True)
class RowFile:
  """A file of rows.

  Attributes:
    path: path of the file, or of its zip.
    member: its name in the zip; "" without a zip.
  """

  path: pathlib.Path
  member: str = ""

  def __str__(self) -> str:
    """Describes the file for messages."""
    return f"{self.member} in {self.path}" if self.member else str(self.path)

  @property
  def name(self) -> pathlib.PurePath:
    """The path of the file, or its path in the zip."""
    return pathlib.PurePosixPath(self.member) if self.member else self.path

  def rows(self) -> Iterator[Row]:
    """Yields the rows, read lazily.

    Raises:
      InputError: the file cannot be read or is malformed.
    """
    files.check_regular(self.path)
    try:
      match self.name.suffix:
        case ".jsonl":
          yield from self._lines()
        case ".json":
          yield from self._json()
        case _:
          yield from self._table()
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
      raise InputError(f"{self} cannot be read: {error}.") from error

  def _lines(self) -> Iterator[Row]:
    for number, text in enumerate(self._texts("line"), start=1):
      if not text.strip():
        continue
      place = f"Line {number} of {self}"
      try:
        fields = files.parse_json(text)
      except ValueError as error:
        raise InputError(f"{place} is not valid JSON: {error}.") from error
      yield _row(place, fields)

  def _json(self) -> Iterator[Row]:
    """Yields rows of a JSON array, or else of JSON lines."""
    document = b"".join(self._texts("document"))
    if not document.lstrip().startswith(b"["):
      yield from self._lines()
      return
    try:
      rows = files.parse_json(document)
    except ValueError as error:
      raise InputError(f"{self} is not valid JSON: {error}.") from error
    for number, fields in enumerate(rows, start=1):
      yield _row(f"Row {number} of {self}", fields)

  def _texts(self, sample_by: str) -> Iterator[bytes]:
    """Yields lines or the full document; the JSON reader would change types."""
    # Latin-1 preserves every byte, so that only lines with invalid UTF-8 are
    # rejected. In a zip, `datasets` always reads UTF-8.
    lines = _datasets().IterableDataset.from_text(
      self._source, encoding="latin-1", sample_by=sample_by
    )
    try:
      for line in lines:
        yield line["text"].encode("utf-8" if self.member else "latin-1")
    except UnicodeDecodeError as error:
      raise InputError(
        f"Line {self._first_undecodable()} of {self} is not valid JSON: it is "
        "no UTF-8."
      ) from error

  def _first_undecodable(self) -> int:
    with zipfile.ZipFile(self.path) as archive:
      lines = archive.read(self.member).split(b"\n")
    return next(
      n for n, line in enumerate(lines, start=1) if not _is_utf8(line)
    )

  def _table(self) -> Iterator[Row]:
    try:
      for number, fields in enumerate(self._dataset(), start=1):
        yield Row(f"Row {number} of {self}", fields)
    except _datasets().exceptions.DatasetsError as error:
      raise self._unlike(error) from error
    except ValueError as error:  # includes Arrow's errors
      raise self._unlike(error) from error

  def _dataset(self) -> Any:
    table = _datasets().IterableDataset
    if self.name.suffix == ".parquet":
      return table.from_parquet(self._source)
    return table.from_file(str(self.path))

  @property
  def _source(self) -> str:
    """Returns the file's address for `datasets`, a pattern unless in a zip."""
    if self.member:
      return f"zip://{self.member}::{self.path}"
    return glob.escape(str(self.path))

  def _unlike(self, error: Exception) -> InputError:
    said = " ".join(str(error).split()).removesuffix(".")
    return InputError(
      f"{self} is no {self.name.suffix[1:]} file, or is cut short: {said}."
    )


def _row(place: str, fields: Any) -> Row:
  if not isinstance(fields, dict):
    raise InputError(f"{place} must hold a JSON object.")
  return Row(place, fields)


def _is_utf8(line: bytes) -> bool:
  try:
    line.decode()
  except UnicodeDecodeError:
    return False
  return True


@functools.cache
def _datasets() -> types.ModuleType:
  """Imports `datasets` on first use, since that takes seconds."""
  module = library("datasets")
  # It logs errors before it raises them.
  module.logging.set_verbosity(module.logging.CRITICAL)
  return module
