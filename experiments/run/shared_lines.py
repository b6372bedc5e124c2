"""A resumable file of records that many hosts make and one writes."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from kvjax.experiments.run import multihost, typed_records
from kvjax.experiments.run.line_files import Line, LineFile


class SharedLines[Record: Line]:
  """The records of a file that the first host reads and writes; all know them.

  Attributes:
    records: the records by their keys.
  """

  def __init__(
    self, path: pathlib.Path, shared: Any, kind: type[Record], name: str
  ):
    """Reads the existing records; all hosts must call it.

    Arguments and errors are those of `LineFile`.
    """
    self._kind = kind
    self._file: LineFile[Record] | None = None

    def open_file() -> bytes:
      self._file = LineFile(path, shared, kind, name)
      found = list(self._file.records.values())
      # For the other hosts.
      return self._encode(found) if multihost.count() > 1 else b""

    existing = multihost.from_first(open_file)
    self.records: dict[Hashable, Record]
    if self._file is None:
      self.records = {each.key: each for each in self._decode(existing)}
    else:
      self.records = dict(self._file.records)

  def add(self, records: Sequence[Record]) -> None:
    """Adds records that all hosts know; see `LineFile.add`."""
    if self._file is not None:
      self._file.add(records)
    self.records |= {each.key: each for each in records}

  def share[Item](
    self, items: Sequence[Item], work: Callable[[Item], Iterator[list[Record]]]
  ) -> Iterator[list[Record]]:
    """Yields the records of all items on all hosts; see `multihost.share`."""
    return multihost.share(items, work, self._encode, self._decode)

  def _encode(self, records: Sequence[Record]) -> bytes:
    return json.dumps([dataclasses.asdict(each) for each in records]).encode()

  def _decode(self, payload: bytes) -> list[Record]:
    records = json.loads(payload)
    return [typed_records.make(self._kind, fields) for fields in records]
