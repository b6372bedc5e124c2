"""Reads rows of data files: JSON lines, also in a zip, Parquet and Arrow.

Nothing is downloaded. Arrow files are those of the library `datasets`: its
cache and the output of `save_to_disk`.
"""

import contextlib
import dataclasses
import json
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from kvjax.errors import InputError
from kvjax.experiments.metrics.libraries import library

SUFFIXES = (".jsonl", ".parquet", ".arrow")

_BATCH = 64


def below(path: pathlib.Path) -> list[pathlib.Path]:
  """Lists the file, or all files in the folder, sorted by name.

  Raises:
    InputError: the path does not exist.
  """
  if not path.exists():
    raise InputError(f"There is no file or folder {path}.")
  return sorted(path.rglob("*")) if path.is_dir() else [path]


def has_rows(file: pathlib.Path) -> bool:
  """Returns whether a file has rows; excludes caches of `datasets`."""
  return file.suffix in SUFFIXES and not file.name.startswith("cache-")


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
    try:
      if self.name.suffix == ".jsonl":
        yield from self._lines()
      else:
        yield from self._table()
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
      raise InputError(f"{self} cannot be read: {error}.") from error

  def _lines(self) -> Iterator[Row]:
    with self._opened() as file:
      for number, line in enumerate(file, start=1):
        if not line.strip():
          continue
        place = f"Line {number} of {self}"
        try:
          fields = json.loads(line)
        except (ValueError, RecursionError) as error:
          raise InputError(f"{place} is not valid JSON: {error}.") from error
        if not isinstance(fields, dict):
          raise InputError(f"{place} must hold a JSON object.")
        yield Row(place, fields)

  @contextlib.contextmanager
  def _opened(self) -> Iterator[IO[bytes]]:
    if self.member:
      with (
        zipfile.ZipFile(self.path) as archive,
        archive.open(self.member) as file,
      ):
        yield file
    else:
      with self.path.open("rb") as file:
        yield file

  def _table(self) -> Iterator[Row]:
    arrow = library("pyarrow")
    number = 0
    try:
      for batch in self._batches():
        for fields in batch.to_pylist():
          number += 1
          yield Row(f"Row {number} of {self}", fields)
    except arrow.ArrowInvalid as error:
      raise InputError(
        f"{self} is no {self.path.suffix[1:]} file, or is cut short: {error}."
      ) from error

  def _batches(self) -> Iterator[Any]:
    if self.path.suffix == ".parquet":
      with library("pyarrow.parquet").ParquetFile(self.path) as file:
        yield from file.iter_batches(_BATCH)
    else:
      ipc = library("pyarrow.ipc")
      with self.path.open("rb") as file, ipc.open_stream(file) as batches:
        yield from batches
