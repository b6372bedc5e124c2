"""The files of a Hugging Face directory that hold its weights."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import safetensors

from kvjax.errors import InputError, warn
from kvjax.files import read_json
from kvjax.models.mxfp4 import join_blocks

# Of a name in a message.
_LONGEST = 100
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The folder of a checkpoint of orbax, see `kvjax.models.orbax_files`.
CHECKPOINT = "model.orbax"
# Where files of models with images have the text decoder, and the rest.
_TEXT = {
  "model.language_model.": "model.",
  "language_model.model.": "model.",
  "language_model.lm_head.": "lm_head.",
  "model.text_model.": "model.",
}
_IMAGES = (
  "vision_tower.",
  "multi_modal_projector.",
  "vision_model.",
  "vision_encoder.",
  "visual.",
  "connector.",
  "image_newline",
)


@dataclasses.dataclass(frozen=True)
class Tensors:
  """Tensors that a decoder's weights are read from.

  Attributes:
    files: the file of each tensor, by Hugging Face's names of tensors; an
      object with `get_slice` and `get_tensor`, as in safetensors.
    place: path of the file or directory, for messages.
    described_by: what determines the expected shapes, for messages.
    original_name: maps a tensor's name to its name in the file.
  """

  files: Mapping[str, Any]
  place: pathlib.Path
  described_by: str = "config.json"
  original_name: Callable[[str], str] = str


def open_tensors(directory: pathlib.Path) -> Tensors:
  """Opens the tensors of a Hugging Face directory.

  Those of a vision tower beside a text decoder are skipped, and a warning says
  so. Experts in MXFP4 are dequantized as they are read.

  Args:
    directory: a directory with model.safetensors, or with several files and
      their index.

  Raises:
    InputError: a file is missing or broken.
  """
  files = _text_decoder(_open(directory), directory)
  return Tensors(join_blocks(files, directory), directory)


def has_checkpoint(directory: pathlib.Path) -> bool:
  """Says whether the weights are a checkpoint of orbax, not safetensors."""
  has_tensors = any((directory / name).is_file() for name in (SINGLE, INDEX))
  return not has_tensors and os.path.isdir(directory / CHECKPOINT)


def _open(directory: pathlib.Path) -> dict[str, Any]:
  """Opens the files; returns the file of each tensor."""
  if (directory / SINGLE).is_file():
    names = [SINGLE]
  elif (directory / INDEX).is_file():
    names = _shard_names(directory / INDEX)
  else:
    raise InputError(
      f"{directory} has no weights; it should hold {SINGLE}, shards and "
      f"{INDEX}, or {CHECKPOINT}."
    )
  files: dict[str, Any] = {}
  for name in names:
    if not os.path.isfile(directory / name):
      raise InputError(
        f"{directory} lacks the shard {name[:_LONGEST]} that {INDEX} names."
      )
    try:
      file = safetensors.safe_open(directory / name, framework="numpy")
    except (safetensors.SafetensorError, OSError, MemoryError) as error:
      raise InputError(
        f"{directory / name} is not a complete safetensors file ({error}); "
        "fetch it again."
      ) from error
    files |= dict.fromkeys(file.keys(), file)
  return files


def _shard_names(index: pathlib.Path) -> list[str]:
  weight_map = read_json(index).get("weight_map")
  names = weight_map.values() if isinstance(weight_map, dict) else [None]
  if not all(_is_name(name) for name in names):
    raise InputError(
      f"{index} must have a weight_map that gives each tensor the name of its "
      "file."
    )
  return sorted(set(names))


def _is_name(value: object) -> bool:
  """Whether a value names a file in the folder of the index."""
  return isinstance(value, str) and pathlib.PurePath(value).name == value


def _text_decoder(
  files: Mapping[str, Any], directory: pathlib.Path
) -> dict[str, Any]:
  """Leaves out the vision tower; names the text decoder as if it were alone."""
  kept: dict[str, Any] = {}
  skipped = 0
  for name, file in files.items():
    if name.removeprefix("model.").startswith(_IMAGES):
      skipped += 1
      continue
    start = next((start for start in _TEXT if name.startswith(start)), "")
    kept[_TEXT.get(start, "") + name.removeprefix(start)] = (
      _Renamed(file, name) if start else file
    )
  if skipped:
    warn(
      f"{directory} holds {skipped} tensors of a vision tower, which are "
      "skipped: kvjax runs the text decoder alone."
    )
  return kept


@dataclasses.dataclass(frozen=True)
class _Renamed:
  """A file with one tensor, under another name."""

  file: Any
  name: str

  def get_slice(self, name: str) -> Any:
    """Returns the slices of the tensor."""
    del name
    return self.file.get_slice(self.name)

  def get_tensor(self, name: str) -> Any:
    """Reads the tensor."""
    del name
    return self.file.get_tensor(self.name)
