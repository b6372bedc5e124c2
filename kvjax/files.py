"""Reading of text and JSON, and atomic writing.

All files that kvjax writes go through `replacing` or `append`, except for
caches and checkpoints, which orbax writes as atomically; for the records that
runs resume from (`kvjax.experiments.run.line_files`), which keep whole lines;
and for what is fetched (`kvjax.models.downloads`, `kvjax.addresses`), which is
written to a temporary folder, checked, and on the disk before it gets its name.
"""

import contextlib
import io
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvjax.errors import InputError

Path = str | os.PathLike[str]

# A larger text is a mistake, and does not fit into memory.
_MOST_BYTES = 2**31
# Of a path in a message; longer ones are no paths.
_LONGEST_PATH = 400
# Of an error of a library in a message.
_SAID = 200
# No float can represent a whole number of thousands of digits.
_LARGEST_NUMBER = 2**63


def check_regular(path: Path) -> None:
  """Refuses what could be read for ever: pipes and devices.

  Reading a folder, or a file that does not exist, fails by itself.

  Raises:
    InputError: the path is a pipe, a device or a socket.
  """
  if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
    raise InputError(f"{path} is a pipe or a device; give a regular file.")


def check_whole(path: Path) -> None:
  """Refuses what does not fit into memory as a whole, too.

  Raises:
    InputError: as for `check_regular`, or the file is larger than 2 GiB.
  """
  check_regular(path)
  size = os.path.getsize(path) if os.path.exists(path) else 0
  if size > _MOST_BYTES:
    raise InputError(
      f"{path} has {size:,} bytes; at most {_MOST_BYTES:,} are read at once."
    )


def read_text(path: Path) -> str:
  """Reads a text file.

  Raises:
    InputError: the file cannot be read, is no regular file, is larger than 2
      GiB, or is not UTF-8.
  """
  check_whole(path)
  try:
    return pathlib.Path(path).read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise InputError(f"{path} is not text in UTF-8: {error}.") from error
  except ValueError as error:
    raise InputError(f"{path!r} is no path: {error}.") from error
  except OSError as error:
    place = str(path)[:_LONGEST_PATH]
    raise InputError(f"{place} cannot be read: {error.strerror}.") from error


def parse_json(text: str | bytes) -> Any:
  """Parses JSON whose texts can be written as UTF-8.

  Raises:
    ValueError: it is not valid, nested too deeply, has a number of thousands of
      digits, or has half of a surrogate pair, which is no character.
  """
  try:
    value = json.loads(text)
  except RecursionError as error:
    raise ValueError("it is nested too deeply") from error
  # Only an escape can stand for half a pair; most texts have none.
  escaped = b"\\u" in text if isinstance(text, bytes) else "\\u" in text
  if escaped:
    json.dumps(value, ensure_ascii=False).encode()
  return value


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    InputError: the file cannot be read, or does not hold a JSON object.
  """
  text = read_text(path)
  try:
    value = parse_json(text)
  except ValueError as error:
    raise InputError(f"{path} is not valid JSON: {error}.") from error
  if not isinstance(value, dict):
    raise InputError(f"{path} must hold a JSON object.")
  return value


def is_json_number(value: Any) -> bool:
  """Whether a value of a JSON file is a number that a float can represent.

  NaN and infinity are, and true and false are not.
  """
  # `isinstance` would take true for an integer.
  if type(value) is int:
    return abs(value) < _LARGEST_NUMBER
  return type(value) is float


def is_present(path: Path) -> bool:
  """Whether there is something of this name, be it a link to nothing."""
  return os.path.lexists(path)


def read_json_if_present(path: Path) -> dict[str, Any]:
  """Reads a JSON object, or an empty one where there is no file."""
  return read_json(path) if is_present(path) else {}


def check_replaceable(path: Path, kept: str = "") -> None:
  """Refuses to write where something else than a file is.

  A program of root's could otherwise remove /dev/null.

  Args:
    path: the file to write.
    kept: see `replacing`.

  Raises:
    InputError: the path is a folder, a device, a pipe or a loop of links.
  """
  target = os.path.realpath(path)
  # The real path of a loop of links is one of them, which does not exist.
  if os.path.lexists(target) and not os.path.isfile(target):
    folder = os.path.isdir(target)
    said = "Is a directory" if folder else "it is no regular file"
    raise InputError(f"{path} cannot be written: {said}{kept}.")


@contextlib.contextmanager
def replacing(path: Path, kept: str = "") -> Iterator[pathlib.Path]:
  """Yields a path next to `path`; the file written there replaces it.

  The file is on the disk before it gets its name. A full disk or a kill leaves
  what was there before. A link stays a link.

  Args:
    path: the file to write; its folder must exist.
    kept: ends the error's sentence, such as "; the answers are kept".

  Raises:
    InputError: the file cannot be written, or the path is something else, such
      as a folder or a device.
  """
  target = pathlib.Path(os.path.realpath(path))
  check_replaceable(path, kept)
  part = part_of(target)
  try:
    yield part
    with part.open("r+b") as file:
      os.fsync(file.fileno())
    part.replace(target)
  except BaseException as error:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)
    if isinstance(error, OSError):
      raise _unwritten(path, error, kept) from error
    raise


def part_of(path: pathlib.Path) -> pathlib.Path:
  """The path of a file that is being written; a killed program leaves it."""
  return path.with_name(f".{path.name}.part")


def is_part(name: str) -> bool:
  """Whether a name is of a file or folder that is still being written.

  Files are those of `part_of`, and folders those of orbax.
  """
  ours = name.startswith(".") and name.endswith(".part")
  return ours or ".orbax-checkpoint-tmp" in name


def write_bytes(path: Path, content: bytes, kept: str = "") -> None:
  """Writes a file atomically; arguments and errors as for `replacing`."""
  with replacing(path, kept) as part:
    part.write_bytes(content)


def write_text(path: Path, text: str, kept: str = "") -> None:
  """Writes text in UTF-8 atomically; as for `replacing`."""
  write_bytes(path, text.encode(), kept)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
  """Writes a JSON object atomically, indented, with a final newline.

  Raises:
    InputError: the file cannot be written.
  """
  text = json.dumps(value, indent=2, ensure_ascii=False)
  write_text(path, text + "\n")


def append(path: Path, content: bytes) -> None:
  """Appends to a file, which keeps its size if not all can be written.

  Raises:
    InputError: the file cannot be written, or is no regular file.
  """
  place = pathlib.Path(path)
  check_replaceable(place)
  try:
    # Without a buffer, nothing is left for when the file is closed.
    with place.open("ab", buffering=0) as file:
      size = file.tell()
      try:
        write_all(file, content)
      except BaseException:
        file.truncate(size)
        raise
  except OSError as error:
    raise _unwritten(path, error) from error


def write_all(file: io.FileIO, content: bytes) -> None:
  """Writes to a file without a buffer, which may take a part at a time."""
  rest = memoryview(content)
  while rest:
    rest = rest[file.write(rest) :]


def sync(path: Path) -> None:
  """Puts a file, or the names in a folder, on the disk.

  Windows does neither for what is open for reading only.
  """
  if os.name == "nt":
    return
  number = os.open(path, os.O_RDONLY)
  try:
    os.fsync(number)
  finally:
    os.close(number)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
  """Keeps other programs from working on a folder; a kill ends it."""
  try:
    import fcntl
  except ImportError:  # Windows: programs may work at the same time.
    yield
    return
  number = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(number, fcntl.LOCK_EX)
    yield
  finally:
    os.close(number)


def orbax() -> Any:
  """Imports orbax, for which a program that saves nothing need not wait."""
  from orbax.checkpoint import v1

  return v1


def reason(error: Exception) -> str:
  """Says why a file cannot be written or read, in the system's words.

  Args:
    error: an OSError, or the ValueError that orbax raises in its place.
  """
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  said = " ".join(str(error).split())
  # Tensorstore: "Failed to write 95 bytes to file 19: File too large [...".
  match = re.search(r" file \d+: ([\w ]+)", said)
  return match[1].strip() if match else said[:_SAID].removesuffix(".")


def _unwritten(path: Path, error: OSError, kept: str = "") -> InputError:
  return InputError(f"{path} cannot be written: {reason(error)}{kept}.")
