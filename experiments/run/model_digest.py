"""The digest of a model: answers belong to its files."""

import pathlib

from kvjax.experiments.calibration.record_files import FOLDER
from kvjax.experiments.run import plugin_files
from kvjax.experiments.run.digests import digest_of
from kvjax.files import read_json_if_present
from kvjax.models import other_families
from kvjax.models.tensor_files import CHECKPOINT, has_checkpoint


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
    # Which files it reads is its own business, and its code decides, too.
    paths = sorted(model.rglob("*"))
    used = [p for p in paths if p.is_file() and FOLDER not in p.parts]
    return digest_of(used, plugin_files.files_of(load.__module__))
  names = ["*.safetensors", "*.json", "*.jinja"]
  if not (model / "config.json").is_file():
    names.append("*.gguf")
  if has_checkpoint(model):
    names.append(f"{CHECKPOINT}/**/*")
  paths = sorted(path for name in names for path in model.glob(name))
  # Loading says what is wrong with the others.
  return digest_of(path for path in paths if path.is_file())
