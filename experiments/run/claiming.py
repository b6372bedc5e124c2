"""Folders of runs, which no other run may take."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import InputError
from kvjax.files import is_present, read_json, write_json
from kvjax.models.fields import format_value


def claim(path: Path, settings: Mapping[str, Any]) -> None:
  """Claims a folder for a run, or rejects the folder of another run.

  Args:
    path: the file that says whose the folder is.
    settings: what must be the same to resume.

  Raises:
    InputError: the folder's run has other settings or cannot be read, or the
      folder has a model without a run.
  """
  ours = json.loads(json.dumps(settings))
  claimed = is_present(path)
  if not claimed and is_present(path.parent / "config.json"):
    raise InputError(
      f"{path.parent} holds a model, which would be overwritten; choose "
      "another --output."
    )
  if claimed:
    theirs = read_json(path)
    for name, value in ours.items():
      if theirs.get(name) != value:
        said = format_value(theirs.get(name))
        raise InputError(
          f"{path.parent} holds a run with {name} {said}, and this one has "
          f"{name} {value}; choose another --output."
        )
  write_json(path, ours)
