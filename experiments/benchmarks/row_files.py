"""Reads rows of data files: JSON, JSON lines, CSV, Parquet and Arrow.

Each may be in a zip, and the first three may be compressed by gzip instead.
Rows are streamed, and only the requested ones are read. Parquet and Arrow are
read by `datasets`, Arrow as streams, as in its cache and the output of
`save_to_disk`, and as files.
`datasets` would change the types in JSON and CSV, and has no limit on a line's
length.
"""

import codecs
import contextlib
import csv
import dataclasses
import functools
import glob
import gzip
import io
import os
import pathlib
import sys
import types
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.benchmarks.rows import Row
from kvjax.experiments.metrics.libraries import library

_TEXT = (".jsonl", ".json", ".csv")
_GZIP = ".gz"
SUFFIXES = (*_TEXT, *(each + _GZIP for each in _TEXT), ".parquet", ".arrow")

# A row takes about a millionth of it.
_LONGEST_LINE = 2**28
_MOST_BYTES = 2**31
_BEGINNING = 2**16
# Rows of Parquet that are read at once.
_BATCH = 64

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


def find(path: pathlib.Path) -> "list[RowFile]":
  """Lists the files of rows in a file, folder or zip, sorted by name.

  In a folder, only a zip called `data.zip` counts, as on the hub.

  Raises:
    InputError: the path does not exist, or a zip cannot be read.
  """
  found: list[RowFile] = []
  for file in below(path):
    if file.suffix == ".zip" and (file == path or file.name == "data.zip"):
      found += _members(file)
    else:
      found.append(RowFile(file))
  return [file for file in found if file.has_rows]


def _members(path: pathlib.Path) -> "Iterator[RowFile]":
  files.check_regular(path)
  try:
    with zipfile.ZipFile(path) as archive:
      names = sorted(archive.namelist())
  except (OSError, zipfile.BadZipFile) as error:
    raise InputError(f"{path} is no zip file: {error}.") from error
  for name in names:
    yield RowFile(path, name)


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

  def below(self, root: pathlib.Path) -> pathlib.PurePath:
    """Returns the path in a folder, in a zip with that of the member."""
    return self.path.relative_to(root) / self.member

  @property
  def kind(self) -> str:
    """The suffix of its format, such as `.jsonl`, without that of gzip."""
    return self._plain.suffix

  @property
  def stem(self) -> str:
    """The name without folders and suffixes."""
    return self._plain.stem

  @property
  def is_text(self) -> bool:
    """Whether its format is JSON, JSON lines or CSV."""
    return self.kind in _TEXT

  @property
  def has_rows(self) -> bool:
    """Whether it has rows; excludes caches of `datasets` and macOS's notes."""
    # Gzip within a zip is not read.
    packed_twice = self.member and self._is_packed_by_gzip
    return (
      self.kind in SUFFIXES
      and not packed_twice
      and self.name.name not in _ABOUT
      and not self.name.name.startswith(("cache-", "._"))
    )

  @property
  def _is_packed_by_gzip(self) -> bool:
    return self.name.suffix == _GZIP

  @property
  def _plain(self) -> pathlib.PurePath:
    """The name without the suffix of gzip."""
    name = self.name
    plain = name.with_suffix("") if self._is_packed_by_gzip else name
    return plain if plain.suffix in _TEXT else name

  def rows(self) -> Iterator[Row]:
    """Yields the rows, read lazily.

    Raises:
      InputError: the file cannot be read or is malformed.
    """
    files.check_regular(self.path)
    try:
      match self.kind:
        case ".csv":
          yield from self._csv()
        case ".jsonl":
          yield from self._lines()
        case ".json":
          yield from self._json()
        case _:
          yield from self._table()
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
      raise InputError(f"{self} cannot be read: {error}.") from error

  def _lines(self) -> Iterator[Row]:
    for number, line in enumerate(self._texts(), start=1):
      if not line.strip():
        continue
      place = f"Line {number} of {self}"
      try:
        fields = files.parse_json(line)
      except ValueError as error:
        raise InputError(f"{place} is not valid JSON: {error}.") from error
      yield Row.of(place, fields)

  def _json(self) -> Iterator[Row]:
    """Yields rows of a JSON array, or else of JSON lines."""
    with self._opened() as file:
      document = file.read(_BEGINNING)
      # Some programs begin files with a mark of the byte order.
      unmarked = document.removeprefix(codecs.BOM_UTF8)
      is_array = unmarked.lstrip().startswith(b"[")
      document += file.read(_MOST_BYTES) if is_array else b""
    if not is_array:
      yield from self._lines()
      return
    _check_size(str(self), document, _MOST_BYTES)
    try:
      rows = files.parse_json(document)
    except ValueError as error:
      raise InputError(f"{self} is not valid JSON: {error}.") from error
    for number, fields in enumerate(rows, start=1):
      yield Row.of(f"Row {number} of {self}", fields)

  def _csv(self) -> Iterator[Row]:
    """Yields rows whose fields are all texts, named by their last lines."""
    csv.field_size_limit(sys.maxsize)  # Contexts are long.
    # Spreadsheets begin files with a mark of the byte order.
    lines = (
      line.decode("utf-8-sig" if number == 0 else "utf-8")
      for number, line in enumerate(self._texts())
    )
    reader = csv.DictReader(lines, strict=True)
    try:
      for number, fields in enumerate(reader, start=1):
        place = f"Row {number} (line {reader.line_num}) of {self}"
        if None in fields or None in fields.values():
          raise InputError(
            f"{place} must have {len(reader.fieldnames or ())} fields, as many "
            "as the first line."
          )
        yield Row(place, fields, printed=True)
    except (csv.Error, UnicodeDecodeError) as error:
      raise InputError(
        f"{self} is not valid CSV after line {reader.line_num}: {error}."
      ) from error

  def _texts(self) -> Iterator[bytes]:
    """Yields lines with their endings, of any kind."""
    with self._opened() as file:
      # Latin-1 preserves every byte, so that only lines with invalid UTF-8 are
      # rejected.
      lines = io.TextIOWrapper(file, "latin-1", newline="")
      while text := lines.readline(_LONGEST_LINE + 1):
        _check_size(f"A line of {self}", text, _LONGEST_LINE)
        yield text.encode("latin-1")

  @contextlib.contextmanager
  def _opened(self) -> Iterator[IO[bytes]]:
    """Opens what a text holds, unpacked."""
    if self.member:
      with zipfile.ZipFile(self.path) as archive:
        try:
          file = archive.open(self.member)
        except (RuntimeError, NotImplementedError) as error:
          # It is encrypted, or compressed in another way.
          raise InputError(
            f"{self} cannot be read: {str(error).removesuffix('.')}."
          ) from error
        with file:
          yield file
    else:
      opener: Any = gzip.open if self._is_packed_by_gzip else open
      with opener(self.path, "rb") as unpacked:
        yield unpacked

  def _table(self) -> Iterator[Row]:
    # Arrow's errors are of the first kind.
    unlike = (ValueError, _datasets().exceptions.DatasetsError)
    try:
      for number, fields in enumerate(self._dataset(), start=1):
        yield Row(f"Row {number} of {self}", fields)
    except unlike as error:
      said = " ".join(str(error).split()).removesuffix(".")
      raise InputError(
        f"{self} is no {self.kind[1:]} file, or is cut short: {said}."
      ) from error

  def _dataset(self) -> Any:
    if self.kind == ".parquet":
      # By default, a batch is as long as the first group, which may be empty.
      return _datasets().IterableDataset.from_parquet(
        self._source, batch_size=_BATCH
      )
    return _datasets().load_dataset(
      "arrow", data_files=self._source, split="train", streaming=True
    )

  @property
  def _source(self) -> str:
    """Returns the file's address for `datasets`, a pattern unless in a zip."""
    if self.member:
      return f"zip://{self.member}::{self.path}"
    return glob.escape(str(self.path))


def _check_size(what: str, begun: str | bytes, most: int) -> None:
  """Refuses files of zeros, and small ones that unpack to them."""
  if len(begun) > most:
    raise InputError(
      f"{what} has more than {most:,} bytes; give one row a line."
    )


@functools.cache
def _datasets() -> types.ModuleType:
  """Imports `datasets` on first use, since that takes seconds."""
  module = library("datasets")
  # It logs errors before it raises them.
  module.logging.set_verbosity(module.logging.CRITICAL)
  return module
