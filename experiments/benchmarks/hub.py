"""Downloads datasets of the Hugging Face hub by name."""

import functools
import os
import pathlib
import re
from typing import Literal

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.row_files import SUFFIXES
from kvjax.experiments.metrics.libraries import library

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w-][\w./-]*)?")


def resolve(name: str, only: str = "*") -> pathlib.Path:
  """Returns a file or folder, after downloading it if it is a dataset's name.

  Downloads stay in the user's cache of the hub, which also works offline.

  Args:
    name: a file or folder, or the name of a dataset, as in `simonjegou/ruler`,
      or `simonjegou/ruler@REVISION` for a branch, a tag or a commit.
    only: pattern of the file names to download, without suffix.

  Raises:
    InputError: there is no such file or folder, and the hub has no accessible
      dataset of that name and revision.
  """
  path = pathlib.Path(name)
  if os.path.exists(path):
    return path
  if not _NAME.fullmatch(name):
    raise InputError(f"There is no file or folder {name[:200]}.")
  return _download(name, only)


def name_of(path: pathlib.Path) -> str | None:
  """Returns the name and revision of a dataset in the hub's cache, or None."""
  name = cached_name(path, "datasets")
  return name and f"{name} (revision {path.name[:12]})"


def cached_name(
  path: pathlib.Path, kind: Literal["datasets", "models"]
) -> str | None:
  """Returns the name of what a folder of the hub's cache holds, or None.

  Such a folder is `KIND--ORG--NAME/snapshots/COMMIT`, or without an
  organization; a name may have "--" itself.
  """
  prefix, folder = f"{kind}--", path.parent.parent.name
  if path.parent.name != "snapshots" or not folder.startswith(prefix):
    return None
  return folder.removeprefix(prefix).replace("--", "/", 1)


@functools.cache
def _download(name: str, only: str) -> pathlib.Path:
  hub = library("huggingface_hub")
  errors = library("huggingface_hub.errors")  # The package loads it lazily.
  patterns = [only + suffix for suffix in (*SUFFIXES, ".zip")]
  repository, _, revision = name.partition("@")
  absent = (
    errors.RepositoryNotFoundError,
    errors.RevisionNotFoundError,
    ValueError,
  )
  try:
    folder = hub.snapshot_download(
      repository,
      repo_type="dataset",
      revision=revision or None,
      allow_patterns=patterns,
    )
  except absent as error:
    raise InputError(
      f"There is no file or folder {name}, and the Hugging Face hub gives no "
      f"data set of that name{' and revision' if revision else ''}."
    ) from error
  except OSError as error:
    raise InputError(
      f"There is no file or folder {name}, and the Hugging Face hub cannot be "
      "reached for a data set of that name."
    ) from error
  return pathlib.Path(folder)
