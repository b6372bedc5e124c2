"""JSON and other text files of a model directory."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from kvjax import files
from kvjax.errors import InputError
from kvjax.files import read_text as read_text


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    InputError: the file cannot be read, or does not hold a JSON object.
  """
  text = read_text(path)
  try:
    value = files.parse_json(text)
  except ValueError as error:
    raise InputError(f"{path} is not valid JSON: {error}.") from error
  if not isinstance(value, dict):
    raise InputError(f"{path} must hold a JSON object.")
  return value


def is_present(path: pathlib.Path) -> bool:
  """Whether there is something of this name, be it a link to nothing."""
  return os.path.lexists(path)


def read_json_if_present(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object, or an empty one where there is no file."""
  return read_json(path) if is_present(path) else {}


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes a JSON object atomically, indented, with a final newline.

  Raises:
    InputError: the file cannot be written.
  """
  text = json.dumps(value, indent=2, ensure_ascii=False)
  files.write_text(path, text + "\n")
