"""Downloads of models to the user's cache: whole and checked, or not at all."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
import stat
import sys
import tempfile
from typing import Any, Protocol, runtime_checkable

from kvjax import files
from kvjax.errors import InputError

_RECORD = ".verified.json"


class UnreachableError(InputError):
  """The index or the hub that has a model cannot be reached from here.

  Any other failure, such as a wrong digest, is an InputError of no subclass.
  """


@dataclasses.dataclass(frozen=True)
class ModelFile:
  """A file of a model.

  Attributes:
    name: its name in the model's folder.
    nbytes: its size.
    sha256: its digest, in hexadecimal digits.
  """

  name: str
  nbytes: int
  sha256: str


@runtime_checkable
class Download(Protocol):
  """Where a model comes from."""

  @property
  def label(self) -> str:
    """What is downloaded, in a message."""

  @property
  def license(self) -> str:
    """Name of the license, and where it is."""

  @property
  def files(self) -> tuple[ModelFile, ...]:
    """The files of the model, in the order in which they get their names."""

  @property
  def nbytes(self) -> int:
    """Size of the download."""

  @property
  def nbytes_needed(self) -> int:
    """Disk space that it takes while it lasts."""

  def download(self, place: pathlib.Path, folder: pathlib.Path) -> None:
    """Puts the files into an empty folder.

    Args:
      place: the empty folder.
      folder: where the model will be, for messages.

    Raises:
      UnreachableError: there is no connection to where the files are.
      InputError: the files cannot be downloaded.
      OSError: the folder cannot be written.
    """


def fetch(source: Download, folder: pathlib.Path) -> None:
  """Downloads a model to a folder, unless it is already there.

  Files are checked and on the disk before they get their names. A record with
  them keeps their sizes and times of modification. If these have changed, the
  digest is computed again, and what is damaged is downloaded again. Programs
  that need the same model at the same time wait for each other.

  Args:
    source: where the model comes from.
    folder: the model's own folder, which may not exist yet.

  Raises:
    UnreachableError: there is no connection to where the model is.
    InputError: the model cannot be downloaded, its digest is wrong, or there is
      too little disk space.
  """
  try:
    if _is_whole(source, folder):
      return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(folder.parent):
      # Another program may have fetched it in the meantime.
      if not _is_whole(source, folder):
        _remove_stale(folder)
        _fetch(source, folder)
  except OSError as error:
    raise InputError(
      f"{folder.parent} cannot take {folder.name} ({files.reason(error)}); "
      "make it writable and give it room, or set XDG_CACHE_HOME to another "
      "folder."
    ) from error


def _fetch(source: Download, folder: pathlib.Path) -> None:
  with tempfile.TemporaryDirectory(
    prefix=f"{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
  ) as scratch:
    place = pathlib.Path(scratch)
    _check_room(source, place)
    print(
      f"Fetching {source.label} ({source.nbytes / 1e6:.0f} MB, license: "
      f"{source.license}).",
      file=sys.stderr,
      flush=True,
    )
    try:
      source.download(place, folder)
    except InputError as error:
      raise type(error)(
        f"{str(error).removesuffix('.')}{_said_of_others(source, folder)}."
      ) from error
    for file in source.files:
      _check_digest(source, file, place / file.name)
      files.sync(place / file.name)
    folder.mkdir(exist_ok=True)
    for file in source.files:
      # A rename, as the scratch folder is on the same file system.
      (place / file.name).replace(folder / file.name)
    # Before the record, which after a crash must not vouch for missing files.
    files.sync(folder)
    _write_record(source, folder)


def _is_whole(source: Download, folder: pathlib.Path) -> bool:
  """Whether all files are there and have the right contents."""
  record = _read_record(folder)
  for file in source.files:
    path = folder / file.name
    try:
      status = path.stat()
    except OSError:
      return False
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.nbytes:
      return False
    if record.get(file.name) == _state(file, path):
      continue
    if digest(path) != file.sha256:
      return False
  if record != _states(source, folder):
    # A cache that others have made may not be writable.
    with contextlib.suppress(InputError):
      _write_record(source, folder)
  return True


def _said_of_others(source: Download, folder: pathlib.Path) -> str:
  """Says which files of a model's names have other contents."""
  said = ""
  for file in source.files:
    path = folder / file.name
    try:
      found = digest(path) if path.is_file() else file.sha256
    except OSError:  # It cannot be read.
      continue
    if found != file.sha256:
      said += f"; {path} is there, but its sha256 is {found}, not {file.sha256}"
  return said


def digest(path: pathlib.Path) -> str:
  """Returns a file's sha256 in hexadecimal digits."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _state(file: ModelFile, path: pathlib.Path) -> list[Any]:
  """What is recorded of a file: the digest that it had, and when that was."""
  status = path.stat()
  return [file.sha256, status.st_size, status.st_mtime_ns]


def _states(source: Download, folder: pathlib.Path) -> dict[str, list[Any]]:
  return {file.name: _state(file, folder / file.name) for file in source.files}


def _read_record(folder: pathlib.Path) -> dict[str, Any]:
  try:
    record = files.parse_json(files.read_text(folder / _RECORD))
  except (InputError, ValueError):
    return {}
  return record if isinstance(record, dict) else {}


def _write_record(source: Download, folder: pathlib.Path) -> None:
  content = json.dumps(_states(source, folder), indent=2)
  files.write_text(folder / _RECORD, f"{content}\n")


def _remove_stale(folder: pathlib.Path) -> None:
  """Removes what killed programs have left; nobody else is fetching now."""
  # The random part of a name by `tempfile`.
  name = re.compile(re.escape(folder.name) + r"\.[a-z0-9_]{8}")
  for path in folder.parent.iterdir():
    if name.fullmatch(path.name):
      shutil.rmtree(path, ignore_errors=True)


def _check_room(source: Download, place: pathlib.Path) -> None:
  free = shutil.disk_usage(place).free
  if free < source.nbytes_needed:
    raise InputError(
      f"{place.parent} has {free / 1e6:.0f} MB of room where fetching "
      f"{source.label} takes {source.nbytes_needed / 1e6:.0f} MB; make room, "
      "or set XDG_CACHE_HOME to another folder."
    )


def _check_digest(
  source: Download, file: ModelFile, path: pathlib.Path
) -> None:
  actual = digest(path) if path.is_file() else None
  if actual != file.sha256:
    said = "is missing" if actual is None else f"has the sha256 {actual}"
    raise InputError(
      f"What has been fetched from {source.label} is not the model that is "
      f"wanted: {file.name} {said}, not {file.sha256}."
    )
