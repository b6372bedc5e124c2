"""Reads rows of data files.

The formats are JSON, JSON lines, CSV, Parquet and Arrow. Each may be in a zip,
and the first three may be compressed by gzip instead. The last two are read
with the library `datasets`; Arrow files are its own: its cache and the output
of `save_to_disk`. Rows are streamed: nothing is converted, and only the
requested rows are read.
"""

import ast
import contextlib
import csv
import dataclasses
import functools
import glob
import gzip
import io
import os
import pathlib
import re
import sys
import tokenize
import types
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.metrics.libraries import library

_TEXT = (".jsonl", ".json", ".csv")
_GZIP = ".gz"
SUFFIXES = (*_TEXT, *(each + _GZIP for each in _TEXT), ".parquet", ".arrow")

_LARGEST = 2**31 - 1
_DIGITS = re.compile("[0-9]{1,10}")
# A row takes about a millionth of it.
_LONGEST_LINE = 2**28
_MOST_BYTES = 2**31

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


def printed_list(text: str) -> tuple[str, ...] | None:
  """Reads the items of a list that Python or NumPy has printed, as texts.

  NumPy puts no commas between them.

  Returns:
    None if it is no such list.
  """
  if not (text.startswith("[") and text.endswith("]")):
    return None
  try:
    items = ast.literal_eval(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    texts = [token.string for token in tokens if token.type == tokenize.STRING]
    # Numbers of thousands of digits, in hexadecimal, cannot be printed.
    return tuple(map(str, map(ast.literal_eval, texts) if texts else items))
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return None


class Row(NamedTuple):
  """A row of a file.

  Attributes:
    place: its location, as in "Line 3 of a.jsonl".
    fields: values by name.
    printed: whether lists and numbers are printed as texts, as in CSV.
  """

  place: str
  fields: Mapping[str, Any]
  printed: bool = False

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
    if self.printed and isinstance(value, str):
      items = printed_list(value)
      value = value if items is None else list(items)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
      raise InputError(f"{self.place} needs a list of texts under {name!r}.")
    if not all(isinstance(item, str) for item in values):
      raise InputError(f"{self.place} has under {name!r} what is no text.")
    return tuple(values)

  def number(self, name: str, least: int = 0) -> int:
    """Returns an integer field.

    Raises:
      InputError: the field is missing, has another type, or is below `least`
        or more than a count of tokens or words can be.
    """
    value = self.fields.get(name)
    if self.printed and isinstance(value, str) and _DIGITS.fullmatch(value):
      value = int(value)
    if type(value) is not int or not least <= value <= _LARGEST:
      raise InputError(
        f"{self.place} needs a whole number under {name!r}, from {least} to "
        f"{_LARGEST}."
      )
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
    for number, text in enumerate(self._bytes(), start=1):
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
    with self._opened() as file:
      begins = file.readline(_LONGEST_LINE)
      while begins and not begins.strip():
        begins = file.readline(_LONGEST_LINE)
      is_array = begins.lstrip().startswith(b"[")
      document = begins + file.read(_MOST_BYTES) if is_array else b""
    if not is_array:
      yield from self._lines()
      return
    if len(document) >= _MOST_BYTES:
      raise InputError(
        f"{self} has more than {_MOST_BYTES:,} bytes, which are too many for "
        "an array; give one row a line."
      )
    try:
      rows = files.parse_json(document)
    except ValueError as error:
      raise InputError(f"{self} is not valid JSON: {error}.") from error
    for number, fields in enumerate(rows, start=1):
      yield _row(f"Row {number} of {self}", fields)

  def _csv(self) -> Iterator[Row]:
    """Yields rows whose fields are all texts."""
    csv.field_size_limit(sys.maxsize)  # Contexts are long.
    # Spreadsheets begin files with a mark of the byte order.
    lines = (
      line.decode("utf-8-sig" if number == 0 else "utf-8") + "\n"
      for number, line in enumerate(self._bytes())
    )
    reader = csv.DictReader(lines, strict=True)
    try:
      for number, fields in enumerate(reader, start=1):
        place = f"Row {number} of {self}"
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

  def _bytes(self) -> Iterator[bytes]:
    """Yields lines without their breaks.

    Raises:
      InputError: a line is too long for memory, as those of a file of zeros.
    """
    with self._opened() as file:
      number = 0
      while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
          raise InputError(
            f"Line {number} of {self} has more than {_LONGEST_LINE:,} bytes; "
            "give one row a line."
          )
        yield line.removesuffix(b"\n").removesuffix(b"\r")

  @contextlib.contextmanager
  def _opened(self) -> Iterator[IO[bytes] | gzip.GzipFile]:
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
    elif self._is_packed_by_gzip:
      with gzip.open(self.path, "rb") as unpacked:
        yield unpacked
    else:
      with self.path.open("rb") as plain:
        yield plain

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
    if self.kind == ".parquet":
      return table.from_parquet(self._source)
    if not self.member:
      return table.from_file(str(self.path))
    return _datasets().load_dataset(
      "arrow", data_files=self._source, split="train", streaming=True
    )

  @property
  def _source(self) -> str:
    """Returns the file's address for `datasets`, a pattern unless in a zip."""
    if self.member:
      return f"zip://{self.member}::{self.path}"
    return glob.escape(str(self.path))

  def _unlike(self, error: Exception) -> InputError:
    said = " ".join(str(error).split()).removesuffix(".")
    return InputError(
      f"{self} is no {self.kind[1:]} file, or is cut short: {said}."
    )


def _row(place: str, fields: Any) -> Row:
  if not isinstance(fields, dict):
    raise InputError(f"{place} must hold a JSON object.")
  return Row(place, fields)


@functools.cache
def _datasets() -> types.ModuleType:
  """Imports `datasets` on first use, since that takes seconds."""
  module = library("datasets")
  # It logs errors before it raises them.
  module.logging.set_verbosity(module.logging.CRITICAL)
  return module
