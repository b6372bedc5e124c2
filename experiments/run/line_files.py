"""A resumable file of records, one per line."""

import abc
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import tempfile
import types
from collections.abc import (
  Callable,
  Hashable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments.run import multihost, sending, typed_records

_NONE: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Line(abc.ABC):
  """A record that JSON can represent."""

  @property
  @abc.abstractmethod
  def key(self) -> Hashable:
    """Identifies the record in its file."""


class LineFile[Record: Line]:
  """The records of a file, one per line with the fields that all share.

  The first record creates file and folder. An incomplete last line of a killed
  run is dropped and has to be computed again. Nothing else is dropped: a last
  line that this run cannot have begun is refused. Of many hosts, the first one
  reads and writes the file, and all know the records.

  Attributes:
    folder: folder of the file.
    records: the records by their keys.
  """

  def __init__(
    self, path: pathlib.Path, shared: Any, kind: type[Record], name: str
  ):
    """Reads the existing records; all hosts must call it.

    Args:
      path: the file.
      shared: a dataclass of the fields that all records share.
      kind: the class of the records.
      name: name of a record in messages, such as "answer".

    Raises:
      InputError: the folder is not writable, or the file has records with other
        shared fields or malformed lines.
    """
    self.folder = path.parent
    self._shared = dataclasses.asdict(shared)
    self._path = path
    self._kind = kind
    self._name = name
    self._complete_bytes = self._bytes = 0
    self.records: dict[Hashable, Record] = {}
    lines = multihost.from_first(self._read)
    if not multihost.is_first():
      self.records = {each.key: each for each in self._parse(lines)}

  def _read(self) -> bytes:
    """Reads the records, and returns their lines for other hosts."""
    check_writable(self.folder)
    if not os.path.lexists(self._path):
      return b""
    files.check_whole(self._path)
    try:
      with self._path.open("r+b") as file:
        text = file.read()
    except OSError as error:
      raise InputError(
        f"{self._path} cannot be written: {error.strerror}."
      ) from error
    self._bytes = len(text)
    self._complete_bytes = text.rfind(b"\n") + 1
    lines, rest = text[: self._complete_bytes], text[self._complete_bytes :]
    records = self._parse(lines, self._shared)
    self.records = {each.key: each for each in records}
    self._check_rest(rest)
    return lines

  def add(self, records: Iterable[Record]) -> None:
    """Appends records that all hosts know, each with the shared fields.

    Raises:
      InputError: the disk is full, the folder has become read-only, or another
        run writes to it.
    """
    records = list(records)
    if multihost.is_first():
      self._write(self._lines(records))
    self.records |= {record.key: record for record in records}

  def share[Item](
    self, items: Sequence[Item], work: Callable[[Item], Iterator[list[Record]]]
  ) -> Iterator[list[Record]]:
    """Yields the records of all items on all hosts; see `multihost.share`."""
    return multihost.share(items, work, self._lines, self._parse)

  def _write(self, lines: bytes) -> None:
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      # Without a buffer, nothing is left for when the file is closed.
      with self._path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # Not `tell`, which is the end from before the lock was waited for.
        if os.fstat(file.fileno()).st_size != self._bytes:
          raise InputError(
            f"Another run writes to {self._path}; wait until it is done, or "
            "choose another --output."
          )
        file.truncate(self._complete_bytes)
        try:
          files.write_all(file, lines)
        finally:
          self._bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
      raise InputError(
        f"{self._path} cannot be written: {error.strerror}; what it holds is "
        "kept, and the same command goes on from there."
      ) from error
    self._complete_bytes += len(lines)
    sending.send_if_due()

  def _check_rest(self, rest: bytes) -> None:
    """Refuses an incomplete last line unless a run like this one began it."""
    # All lines begin with the shared fields.
    start = _encode(self._shared).removesuffix(b"}")
    if not (start.startswith(rest) or rest.startswith(start)):
      raise InputError(
        f"The last line of {self._path} has no line break, and is not of a run "
        "with these settings; remove the line or choose another --output."
      )

  def _lines(self, records: Iterable[Record]) -> bytes:
    return b"".join(
      _encode(self._shared | dataclasses.asdict(record)) + b"\n"
      for record in records
    )

  def _parse(
    self, lines: bytes, shared: Mapping[str, Any] = _NONE
  ) -> list[Record]:
    return parse_lines(
      lines.splitlines(), self._kind, self._path, self._name, shared
    )


def parse_lines[Record](
  lines: Iterable[bytes | str],
  kind: type[Record],
  path: pathlib.Path,
  name: str,
  shared: Mapping[str, Any] = _NONE,
) -> list[Record]:
  """Makes records of lines.

  Args:
    lines: the lines.
    kind: the class of the records.
    path: the file of the lines, for messages.
    name: name of a record in messages.
    shared: fields that all lines must have.

  Raises:
    InputError: a line is malformed, or has others.
  """
  records = []
  for number, line in enumerate(lines, start=1):
    try:
      fields = files.parse_json(line)
      records.append(typed_records.make(kind, fields))
    except ValueError as error:
      raise InputError(
        f"Line {number} of {path} is no {name}; remove the file, or the line."
      ) from error
    for field, value in shared.items():
      if fields.get(field) != value:
        raise InputError(
          f"{path} holds {name}s with {field} {fields.get(field)}, and this "
          f"run has {field} {value}; remove it or choose another --output."
        )
  return records


def _encode(fields: dict[str, Any]) -> bytes:
  return json.dumps(fields, ensure_ascii=False).encode()


def check_writable(folder: pathlib.Path) -> None:
  """Rejects a folder that cannot be created or written to; creates nothing.

  Of several hosts, only the first one writes.

  Raises:
    InputError: the nearest existing folder is not writable, or the name is too
      long.
  """
  if not multihost.is_first():
    return
  try:
    os.lstat(folder)
  except OSError as error:
    if error.errno == errno.ENAMETOOLONG:
      raise InputError(
        f"{str(folder)[:40]}... is too long for the name of a folder; choose a "
        "shorter one."
      ) from error
  nearest = folder.absolute()
  while not os.path.lexists(nearest) and nearest != nearest.parent:
    nearest = nearest.parent
  if not os.path.isdir(nearest):
    raise InputError(f"{folder} cannot be written: {nearest} is no folder.")
  try:
    with tempfile.TemporaryFile(dir=nearest):
      pass
  except OSError as error:
    raise InputError(
      f"{folder} cannot be written: {error.strerror}."
    ) from error
