"""Writes the files of a run, each whole or not at all."""

import contextlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from kvjax import addresses, files
from kvjax.errors import InputError
from kvjax.experiments.run import multihost, sending
from kvjax.experiments.run.line_files import check_writable
from kvjax.registry.parsing import split_options

# The records that survive if another file of the run cannot be written.
ANSWERS = "answers"


def folder(name: str) -> pathlib.Path:
  """Returns the folder of an --output; errors are those of `check_writable`."""
  path = pathlib.Path(name)
  check_writable(path)
  return path


def check_run(name: str, *, writes: bool) -> None:
  """Refuses the --output of a run that cannot be written.

  Args:
    name: the folder, or an address.
    writes: whether the check may write a file there, and remove it.

  Raises:
    InputError: it is an address that cannot be, or see `check_writable`.
  """
  if not addresses.is_address(name):
    check_writable(pathlib.Path(name))
  elif writes:
    sending.check(name)


def run_folder(parent: str, name: str = "") -> pathlib.Path:
  """Returns the folder of a run, or a copy if it is at an address.

  All hosts must call it.

  Raises:
    InputError: the address cannot be read.
  """
  if addresses.is_address(parent):
    return sending.open_copy(f"{parent.rstrip('/')}/{name}")
  return pathlib.Path(parent) / name


def file(name: str) -> pathlib.Path:
  """Returns the file of an --output.

  Raises:
    InputError: it is something else than a file, or see `check_writable`.
  """
  path = pathlib.Path(name)
  files.check_replaceable(path)
  check_writable(path.absolute().parent)
  return path


def check_file(name: str) -> None:
  """Refuses the --output of a file, or its address, that cannot be written.

  Raises:
    InputError: it cannot.
  """
  if not addresses.is_address(name):
    file(name)
  elif multihost.is_first():
    addresses.Place.of(name).check_file()


@contextlib.contextmanager
def written_file(name: str) -> Iterator[pathlib.Path]:
  """Yields where to write the file of an --output.

  A file at an address is sent in the end, and takes the place of one that is
  there.

  Raises:
    InputError: it cannot be written; what cannot be sent is kept.
  """
  if not addresses.is_address(name):
    path = pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path
    return
  place = addresses.Place.of(name)
  path = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-"), place.name)
  try:
    yield path
    try:
      place.send(path, "")
    except InputError as error:
      said = str(error).removesuffix(".")
      raise InputError(f"{said}; it is kept as {path}.") from error
  except BaseException:
    with contextlib.suppress(OSError):
      path.parent.rmdir()  # Unless the file is there.
    raise
  shutil.rmtree(path.parent, ignore_errors=True)


def check_option(name: str) -> None:
  """Refuses an --output that no option of a method can name.

  Raises:
    InputError: it has colons, but for an address, or commas, which separate
      options and methods.
  """
  if "," in name or len(split_options(name)) > 1:
    raise InputError(
      f"--output={name} cannot be named as an option of a method; give one "
      "without colons and commas."
    )


def write_json(
  path: pathlib.Path, value: Mapping[str, Any] | Sequence[Any], kept: str = ""
) -> None:
  """Writes a JSON file atomically; see `write_text`."""
  text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
  write_text(path, text, kept)


def write_text(path: pathlib.Path, text: str, kept: str = "") -> None:
  """Writes a text file atomically.

  Args:
    path: the file.
    text: its content.
    kept: the records that are not lost on failure, such as `ANSWERS`.

  Raises:
    InputError: the file cannot be written.
  """
  write_bytes(path, text.encode(), kept)


def write_bytes(path: pathlib.Path, content: bytes, kept: str = "") -> None:
  """Writes a file atomically, and its folder if needed; see `write_text`.

  Of several hosts, only the first one writes.
  """
  if not multihost.is_first():
    return
  again = f"; the {kept} are kept, and the same command goes on from there"
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise InputError(
      f"{path} cannot be written: {error.strerror}{again if kept else ''}."
    ) from error
  files.write_bytes(path, content, again if kept else "")
  logging.info("Wrote %s", path)
  sending.send_if_due()
