"""Runs whose --output is an address, such as gs://bucket/results.

The files of a run are on this machine, in a new folder with a copy of what is
at the address. Those that change are sent there from time to time, and in the
end. Nothing is removed from the address.
"""

import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from kvjax import addresses, files
from kvjax.errors import InputError

# Between sends, in seconds.
_BETWEEN = 30.0

# Of a file: when it was changed, in nanoseconds, and its bytes.
_Version = tuple[int, int]
# What a store says of a file, which changes with the file; None without one.
_About = Mapping[str, Any] | None


class _TakenError(InputError):
  """Another run has written a file that this one would overwrite."""


class Copy:
  """A folder of this machine whose files are sent to an address.

  Hidden files are neither fetched nor sent.

  Attributes:
    address: the address.
    folder: the folder.
  """

  def __init__(self, address: str):
    """Copies what is at the address into a new folder.

    Raises:
      InputError: the address cannot be read or written, or is a file, or the
        folder cannot be written.
    """
    self._place = addresses.Place.of(address)
    self.address = self._place.address
    there = self._listed()
    if "" in there:
      raise InputError(f"{self.address} cannot be written: it is a file.")
    self._place.check_writable()
    self.folder = self._fetched(there)
    self._sent = self._versions()
    # What the store said of the files that were fetched, or sent and listed.
    self._there: dict[str, _About] = dict(there)
    # Sent, but not listed since then.
    self._unlisted: set[str] = set()
    self._next = time.monotonic() + _BETWEEN

  def send_if_due(self) -> None:
    """Sends what has changed, if it is time to.

    What cannot be sent is sent later.

    Raises:
      InputError: another run writes to the address.
    """
    if time.monotonic() < self._next:
      return
    try:
      self.send()
    except _TakenError:
      raise
    except InputError as error:
      logging.warning("%s It is tried again.", error)
    self._next = time.monotonic() + _BETWEEN

  def send(self) -> None:
    """Sends what has changed, the oldest first.

    Raises:
      InputError: another run writes to the address, or it cannot be written.
    """
    versions = self._versions()
    changed = [
      name
      for name in sorted(versions, key=lambda name: versions[name])
      if versions[name] != self._sent.get(name)
    ]
    if not changed:
      return
    there = self._listed()
    for name in {*changed} - self._unlisted:
      if there.get(name) != self._there.get(name):
        raise _TakenError(
          f"Another run writes to {self.address}/{name}; wait until it is "
          "done, or choose another --output."
        )
    for name in changed:
      self._unlisted.add(name)
      self._place.send(self.folder / name, name)
      self._sent[name] = versions[name]
    there = self._listed()
    self._there |= {name: there.get(name) for name in self._unlisted}
    self._unlisted.clear()

  def named(self, text: str) -> str:
    """Names the address in a text that names the folder."""
    return text.replace(str(self.folder), self.address)

  def remove(self) -> None:
    """Removes the folder."""
    shutil.rmtree(self.folder.parent, ignore_errors=True)

  def _fetched(self, there: Mapping[str, Mapping[str, Any]]) -> pathlib.Path:
    """Copies files of the address into a new folder."""
    try:
      parent = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-"))
      try:
        folder = parent / self._place.name
        folder.mkdir()
        self._place.download(there, folder)
      except BaseException:
        shutil.rmtree(parent, ignore_errors=True)
        raise
    except OSError as error:
      raise InputError(
        f"{self.address} cannot be copied to {tempfile.gettempdir()}: "
        f"{files.reason(error)}."
      ) from error
    return folder

  def _listed(self) -> dict[str, Mapping[str, Any]]:
    listed = self._place.listed()
    return {name: listed[name] for name in listed if not _is_hidden(name)}

  def _versions(self) -> dict[str, _Version]:
    found = {}
    for parent, _, names in os.walk(self.folder):
      for name in names:
        path = pathlib.Path(parent, name)
        about = path.stat()
        version = (about.st_mtime_ns, about.st_size)
        found[path.relative_to(self.folder).as_posix()] = version
    return {name: found[name] for name in found if not _is_hidden(name)}


# Of this process, which may write to several addresses.
_COPIES: list[Copy] = []


def open_copy(address: str) -> pathlib.Path:
  """Returns a folder for the files of an address; errors are those of `Copy`.

  They are sent by `send_if_due`, and at the end of `sending`.
  """
  copy = Copy(address)
  _COPIES.append(copy)
  return copy.folder


def send_if_due() -> None:
  """Sends what has changed, if it is time to; see `Copy.send_if_due`."""
  for copy in _COPIES:
    copy.send_if_due()


def named(text: str) -> str:
  """Names addresses instead of the folders of their copies."""
  for copy in _COPIES:
    text = copy.named(text)
  return text


@contextlib.contextmanager
def sending() -> Iterator[None]:
  """Sends the files of a program in the end, however it ends.

  Raises:
    InputError: they cannot be sent; they are kept on this machine then.
  """
  try:
    yield
  except BaseException:
    for copy in _COPIES:
      with contextlib.suppress(InputError):
        _finish(copy)
    raise
  for copy in _COPIES:
    _finish(copy)


def _finish(copy: Copy) -> None:
  try:
    copy.send()
  except InputError:
    print(
      f"What could not be sent to {copy.address} is in {copy.folder}.",
      file=sys.stderr,
    )
    raise
  copy.remove()


def _is_hidden(name: str) -> bool:
  return any(part.startswith(".") for part in name.split("/"))
