"""Runs whose --output is an address, such as gs://bucket/results.

The files of a run are on this machine, in a new folder with a copy of what is
at the address. Those that change are sent there from time to time, and in the
end. What another run has written there is not overwritten, and nothing is
removed from the address but what the run itself has removed from a folder whose
name begins with a dot, where it keeps what it has done so far.
"""

import contextlib
import datetime
import hashlib
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from kvjax import addresses, files
from kvjax.errors import InputError
from kvjax.experiments.run import multihost

# Between sends, in seconds.
_BETWEEN = 30.0
# What stores say of a file that changes with its content, the best first.
_CHANGES = ("generation", "etag", "ETag", "md5Hash", "mtime", "created")

# What stores call the time of a file's last change, or of its creation where
# every change makes a new one.
_TIMES = ("mtime", "updated", "LastModified", "last_modified", "created")

# Of a file of this machine: when it was changed, in nanoseconds, and its bytes.
_Version = tuple[int, int]
# Of a file at the address; None without one.
_State = tuple[Any, ...] | None


class _TakenError(InputError):
  """Another run has written a file that this one would overwrite."""


class Copy:
  """A folder of this machine whose files are sent to an address.

  Attributes:
    address: the address.
    folder: the folder.
  """

  def __init__(self, address: str):
    """Copies what is at the address into a new folder.

    Raises:
      InputError: the address cannot be read, or is a file, or the folder cannot
        be written.
    """
    self._place = addresses.Place.of(address)
    self.address = self._place.address
    there = self._place.listed()
    if "" in there:
      raise InputError(f"{self.address} cannot be written: it is a file.")
    self.folder = self._fetched(there)
    self._sent = self._versions()
    # Of the files that were fetched or sent.
    self._there: dict[str, _State] = _states(there)
    # Digests of files that may be there, as sending them has failed.
    self._tried: dict[str, str] = {}
    self._next = time.monotonic() + _BETWEEN
    # Taken by the thread that ends a program, too.
    self._lock = threading.RLock()

  def send_if_due(self, now: bool = False) -> None:
    """Sends what has changed, if it is time to.

    What cannot be sent is sent later.

    Args:
      now: whether to send before it is time.

    Raises:
      InputError: another run writes to the address.
    """
    if not now and time.monotonic() < self._next:
      return
    try:
      self.send()
    except _TakenError:
      raise
    except InputError as error:
      logging.warning("%s It is tried again.", error)
    self._next = time.monotonic() + _BETWEEN

  def send(self) -> None:
    """Sends what has changed, the oldest first, and removes what was scratch.

    Raises:
      InputError: another run writes to the address, or it cannot be written.
    """
    with self._lock:
      versions = self._versions()
      for name in sorted(versions, key=lambda name: versions[name]):
        if versions[name] != self._sent.get(name):
          self._send(name)
          self._sent[name] = versions[name]
      for name in self._sent.keys() - versions.keys():
        if any(part.startswith(".") for part in name.split("/")[:-1]):
          self._remove(name)

  def finish(self) -> None:
    """Sends what has changed, and removes the folder.

    Raises:
      InputError: see `send`; what is not sent is kept on this machine.
    """
    try:
      self.send()
    except InputError as error:
      raise type(error)(
        f"{str(error).removesuffix('.')}; what it lacks is in {self.kept}."
      ) from error
    shutil.rmtree(self.folder.parent, ignore_errors=True)

  def named(self, text: str) -> str:
    """Names the address in a text that names the folder."""
    return text.replace(str(self.folder), self.address)

  @property
  def kept(self) -> str:
    """Where the folder is, as `named` does not find it."""
    return f"{self.folder.parent}, as {self.folder.name}"

  def _send(self, name: str) -> None:
    path = self.folder / name
    self._check(name)
    try:
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    except FileNotFoundError:  # It was removed in the meantime.
      return
    self._tried[name] = digest
    self._place.send(path, name)
    state = _states(self._place.listed()).get(name)
    if state is None or state[0] != size:
      raise self._taken(name)
    self._there[name] = state
    del self._tried[name]

  def _remove(self, name: str) -> None:
    # The last attempt may have succeeded all the same.
    if name in self._place.listed():
      self._check(name)
      self._place.remove([name])
    del self._sent[name]
    self._there.pop(name, None)

  def _check(self, name: str) -> None:
    """Refuses to overwrite a file that is not this run's."""
    state = _states(self._place.listed()).get(name)
    if state == self._there.get(name):
      return
    if state is None or name not in self._tried:
      raise self._taken(name)
    # The last attempt may have succeeded all the same.
    there = hashlib.sha256(self._place.read(name)).hexdigest()
    if there != self._tried[name]:
      raise self._taken(name)

  def _taken(self, name: str) -> _TakenError:
    return _TakenError(
      f"Another run writes to {self.address}/{name}; wait until it is done, or "
      "choose another --output."
    )

  def _fetched(self, there: Mapping[str, Mapping[str, Any]]) -> pathlib.Path:
    """Copies files of the address into a new folder."""
    try:
      parent = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-"))
      try:
        folder = parent / self._place.name
        folder.mkdir()
        self._place.download(there, folder)
        _set_times(folder, there)
      except BaseException:
        shutil.rmtree(parent, ignore_errors=True)
        raise
    except OSError as error:
      raise InputError(
        f"{self.address} cannot be copied to {tempfile.gettempdir()}: "
        f"{files.reason(error)}."
      ) from error
    return folder

  def _versions(self) -> dict[str, _Version]:
    found = {}
    for parent, folders, names in os.walk(self.folder):
      folders[:] = [name for name in folders if not files.is_part(name)]
      for name in names:
        path = pathlib.Path(parent, name)
        if files.is_part(name):
          continue
        try:
          about = path.stat()
        except FileNotFoundError:  # It was removed in the meantime.
          continue
        version = (about.st_mtime_ns, about.st_size)
        found[path.relative_to(self.folder).as_posix()] = version
    return found


# Of this process, which may write to several addresses.
_COPIES: list[Copy] = []
# Whether any host has one.
_ANYWHERE = threading.Event()


def open_copy(address: str) -> pathlib.Path:
  """Returns a folder for the files of an address; errors are those of `Copy`.

  They are sent by `send_if_due`, and at the end of `sending`. All hosts must
  call it; the first one has the files.
  """
  _ANYWHERE.set()
  if not multihost.is_first():
    return pathlib.Path(address)
  copy = Copy(address)
  _COPIES.append(copy)
  return copy.folder


def check(address: str) -> None:
  """Refuses an address that the first host cannot write to.

  Raises:
    InputError: it cannot.
  """
  if multihost.is_first():
    addresses.Place.of(address).check_writable()


def send_if_due(now: bool = False) -> None:
  """Sends what has changed, if it is time to; see `Copy.send_if_due`."""
  for copy in _COPIES:
    copy.send_if_due(now)


def send_at_once(seconds: float) -> None:
  """Sends what has changed from another thread; says what is not sent in time.

  Args:
    seconds: how long it may take.
  """

  def send() -> None:
    for copy in list(_COPIES):
      with contextlib.suppress(InputError):
        copy.finish()

  sender = threading.Thread(target=send, daemon=True)
  sender.start()
  sender.join(seconds)
  _say_kept()


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
    _finish()
  except BaseException as error:
    # An interrupt of the last send has it done again; a second one ends it.
    try:
      _finish()
    except InputError as again:
      if str(again) != str(error):
        print(again, file=sys.stderr)
    except BaseException:
      _say_kept()
      raise
    raise
  if _ANYWHERE.is_set():
    # Hosts that end earlier would wait for this one a few minutes only.
    multihost.gather(b"")


def _finish() -> None:
  """Finishes all copies, also after one that cannot be sent."""
  errors = []
  for copy in _COPIES:
    try:
      copy.finish()
    except InputError as error:
      errors.append(error)
  if errors:
    raise type(errors[0])(" ".join(map(str, errors)))


def _say_kept() -> None:
  for copy in _COPIES:
    if copy.folder.exists():
      said = f"What {copy.address} lacks is in {copy.kept}.\n"
      os.write(sys.stderr.fileno(), said.encode())


def _set_times(
  folder: pathlib.Path, listed: Mapping[str, Mapping[str, Any]]
) -> None:
  """Gives the files of a copy the times of those at the address."""
  for name, about in listed.items():
    told = next((about[key] for key in _TIMES if about.get(key)), None)
    if isinstance(told, str):
      with contextlib.suppress(ValueError):
        told = datetime.datetime.fromisoformat(told)
    if isinstance(told, datetime.datetime):
      told = told.timestamp()
    if isinstance(told, (int, float)):
      os.utime(folder / name, (told, told))


def _states(listed: Mapping[str, Mapping[str, Any]]) -> dict[str, _State]:
  """Returns what changes with the content of each file, the size first."""
  return {
    name: (
      about.get("size"),
      *[about[key] for key in _CHANGES if about.get(key) is not None][:1],
    )
    for name, about in listed.items()
  }
