"""Data sets of the Hugging Face hub, fetched where a user names one."""

import functools
import pathlib
import re

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.row_files import SUFFIXES
from kvjax.experiments.metrics.libraries import library

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FOLDER = "datasets--"


def resolved(name: str, only: str = "*") -> pathlib.Path:
  """The file or folder that is meant, fetched if it is a data set of the hub.

  What is fetched stays in the user's cache of the hub, where it is found
  without a network too.

  Args:
    name: of a file or folder, else of a data set, as in `simonjegou/ruler`.
    only: what the names of the files to fetch are like, up to their suffix.

  Raises:
    InputError: there is no such file or folder, and no data set of that name
      that the hub gives.
  """
  path = pathlib.Path(name)
  if path.exists():
    return path
  if not _NAME.fullmatch(name):
    raise InputError(f"There is no file or folder {name}.")
  return _fetched(name, only)


def name_of(path: pathlib.Path) -> str | None:
  """What the hub calls a data set in its cache, with the revision."""
  kept = path.parent.parent.name
  if path.parent.name != "snapshots" or not kept.startswith(_FOLDER):
    return None
  name = kept.removeprefix(_FOLDER).replace("--", "/")
  return f"{name} (revision {path.name[:12]})"


@functools.cache
def _fetched(name: str, only: str) -> pathlib.Path:
  hub = library("huggingface_hub")
  patterns = [only + suffix for suffix in (*SUFFIXES, ".zip")]
  try:
    found = hub.snapshot_download(
      name, repo_type="dataset", allow_patterns=patterns
    )
  except (hub.errors.RepositoryNotFoundError, ValueError) as error:
    raise InputError(
      f"There is no file or folder {name}, and the Hugging Face hub gives no "
      "data set of that name."
    ) from error
  except OSError as error:
    raise InputError(
      f"There is no file or folder {name}, and the Hugging Face hub cannot be "
      "reached for a data set of that name."
    ) from error
  return pathlib.Path(found)
