"""A file of records: written line by line and resumed."""

import abc
import dataclasses
import fcntl
import json
import pathlib
import tempfile
from collections.abc import Hashable, Iterable
from typing import Any

from kvjax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Line(abc.ABC):
  """A record, of what JSON can hold."""

  @property
  @abc.abstractmethod
  def key(self) -> Hashable:
    """Tells it from all others of its file."""


class LineFile[Record: Line]:
  """The records in a file, old and new, one a line with what all share.

  File and folder are made with the first record. A line that a killed run left
  unfinished is dropped, and what it held is to be made again.

  Attributes:
    folder: where the file is.
    found: the records by their keys.
  """

  def __init__(
    self,
    path: pathlib.Path,
    shared: Any,
    kind: type[Record],
    name: str,
  ):
    """Reads what the file holds.

    Args:
      path: the file.
      shared: a dataclass of what all records share.
      kind: the class of the records.
      name: what a record is called, as in "answer".

    Raises:
      InputError: the folder cannot be written to, or the file holds records
        that share something else or lines that no run has written.
    """
    check_writable(path.parent)
    self.folder = path.parent
    self.found: dict[Hashable, Record] = {}
    self._shared = dataclasses.asdict(shared)
    self._path = path
    self._kind = kind
    self._name = name
    self._whole_bytes = self._bytes = 0
    if self._path.exists():
      text = self._read()
      self._bytes = len(text)
      self._whole_bytes = text.rfind(b"\n") + 1
      lines = text[: self._whole_bytes].splitlines()
      for number, line in enumerate(lines, start=1):
        record = self._parse(line, number)
        self.found[record.key] = record

  def _read(self) -> bytes:
    try:
      with self._path.open("r+b") as file:
        return file.read()
    except OSError as error:
      raise InputError(
        f"{self._path} cannot be written: {error.strerror}."
      ) from error

  def add(self, records: Iterable[Record]) -> None:
    """Appends records, each a line of what is shared and of its own.

    Raises:
      InputError: the disk is full, the folder has become read-only, or another
        run writes to it.
    """
    records = list(records)
    lines = b"".join(self._line(record) for record in records)
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      with self._path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.tell() != self._bytes:
          raise InputError(
            f"Another run writes to {self._path}; wait until it is done, or "
            "choose another --output."
          )
        file.truncate(self._whole_bytes)
        try:
          file.write(lines)
          file.flush()
        finally:
          self._bytes = self._path.stat().st_size
    except OSError as error:
      raise InputError(
        f"{self._path} cannot be written: {error.strerror}; what it holds is "
        "kept, and the same command goes on from there."
      ) from error
    self._whole_bytes += len(lines)
    self.found |= {record.key: record for record in records}

  def _line(self, record: Record) -> bytes:
    fields = self._shared | dataclasses.asdict(record)
    return f"{json.dumps(fields, ensure_ascii=False)}\n".encode()

  def _parse(self, line: bytes, number: int) -> Record:
    try:
      fields = json.loads(line)
      record = self._kind(
        **{f.name: fields.pop(f.name) for f in dataclasses.fields(self._kind)}
      )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise InputError(
        f"Line {number} of {self._path} is no {self._name}; remove the "
        "file or choose another --output."
      ) from error
    for name, value in self._shared.items():
      if fields.get(name) != value:
        raise InputError(
          f"{self._path} holds {self._name}s with {name} {fields.get(name)}, "
          f"and this run has {name} {value}; remove it or choose another "
          "--output."
        )
    return record


def check_writable(folder: pathlib.Path) -> None:
  """Refuses a folder that cannot be made or written to; makes nothing.

  Raises:
    InputError: the nearest folder that exists does not admit new files.
  """
  nearest = folder.absolute()
  while not nearest.exists() and nearest != nearest.parent:
    nearest = nearest.parent
  if not nearest.is_dir():
    raise InputError(f"{folder} cannot be written: {nearest} is no folder.")
  try:
    with tempfile.TemporaryFile(dir=nearest):
      pass
  except OSError as error:
    raise InputError(
      f"{folder} cannot be written: {error.strerror}."
    ) from error
