"""JSON and other text files of a model directory."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from kvjax.errors import InputError


def read_text(path: pathlib.Path) -> str:
  """Reads a text file.

  Raises:
    InputError: the file cannot be read, or is not UTF-8.
  """
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise InputError(f"{path} is not text in UTF-8: {error}.") from error
  except OSError as error:
    raise InputError(f"{path} cannot be read: {error.strerror}.") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    InputError: the file cannot be read, or does not hold a JSON object.
  """
  text = read_text(path)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise InputError(f"{path} is not valid JSON: {error}.") from error
  if not isinstance(value, dict):
    raise InputError(f"{path} must hold a JSON object.")
  return value


def read_json_if_present(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object, or an empty one where there is no file."""
  return read_json(path) if path.exists() else {}


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes a JSON object, indented, with a final newline."""
  text = json.dumps(value, indent=2, ensure_ascii=False)
  path.write_text(text + "\n", encoding="utf-8")
