"""The digest of a model: answers belong to its files."""

import functools
import pathlib
from collections.abc import Iterator

from kvjax.experiments.calibration.record_files import FOLDER
from kvjax.experiments.run import plugin_files
from kvjax.experiments.run.digests import digest_of
from kvjax.files import read_json_if_present
from kvjax.models import other_families
from kvjax.models.tensor_files import CHECKPOINT, has_checkpoint

# The second one is that of the programs' default outputs.
_UNREAD = {FOLDER, "results", "__pycache__"}


def digest(model: pathlib.Path) -> str:
  """Hashes the files of a model that affect answers.

  Args:
    model: a directory, or a GGUF file.
  """
  if model.is_file():
    return digest_of([model])
  config = read_json_if_present(model / "config.json")
  load = other_families.find(config.get("model_type"))
  if load is not None:
    # Its code decides, too.
    return digest_of(_files_of_others(model), _code_of(load))
  names = ["*.safetensors", "*.json", "*.jinja"]
  if not (model / "config.json").is_file():
    names.append("*.gguf")
  if has_checkpoint(model):
    names.append(f"{CHECKPOINT}/**/*")
  paths = sorted(path for name in names for path in model.glob(name))
  # Loading says what is wrong with the others.
  return digest_of(path for path in paths if path.is_file())


def _files_of_others(model: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields all files, as which ones a family of others reads is its business.

  Calibrations, results, and what Python and tools keep beside files change no
  answers.
  """
  for path in sorted(model.rglob("*")):
    parts = path.relative_to(model).parts
    if path.is_file() and not any(
      part in _UNREAD or part.startswith(".") for part in parts
    ):
      yield path


def _code_of(load: other_families.Load) -> tuple[str, ...]:
  """Names the files of what loads a family, each with a digest."""
  while isinstance(load, functools.partial):
    load = load.func
  return plugin_files.files_of(load.__module__)
