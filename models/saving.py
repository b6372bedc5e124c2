"""Saving of models in the layout of Hugging Face directories."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from kvjax import files
from kvjax.addresses import is_address, written
from kvjax.errors import InputError
from kvjax.files import write_json
from kvjax.hosts import from_first, spread
from kvjax.models.orbax_files import write_checkpoint
from kvjax.models.pretrained import Pretrained
from kvjax.models.sources import TOKEN_IDS
from kvjax.models.tensor_files import CHECKPOINT
from kvjax.models.weights import write_weights

FORMATS = ("safetensors", "orbax")
_CONFIG = "config.json"


def save(
  pretrained: Pretrained,
  directory: str | os.PathLike[str],
  max_shard_bytes: int = 5_000_000_000,
  *,
  format: str = "safetensors",
) -> None:
  """Saves a model to a directory that `load` can read.

  All files are written to a temporary directory first and then moved,
  config.json last, so that what is half moved is no model. Existing files with
  these names, and old weights in any format, are replaced; other files stay.

  If weights are spread over several hosts, all of them must call it; the first
  one writes, and the others wait for it. In a program on several hosts, all
  must call it for a checkpoint of orbax in any case, with a directory that they
  share: each then writes its parts of the weights.

  Args:
    pretrained: the model; weights keep their dtype.
    directory: the directory, which is created if it does not exist, or an
      address without files of one host's program, such as gs://bucket/model.
    max_shard_bytes: maximum size of a file of safetensors.
    format: one of `FORMATS`. transformers, too, reads safetensors. Of a
      checkpoint of orbax, devices read and write their own parts of sharded
      weights; it can be loaded under any mesh.

  Raises:
    InputError: a file cannot be written, there is no such format, or the model
      has adapters or is of another package.

  Examples:
    >>> import tempfile
    >>> import kvjax.models
    >>> lm = kvjax.load(kvjax.models.__path__[0] + "/reference")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   kvjax.models.save(lm, folder, format="orbax")
    ...   kvjax.load(folder).model == lm.model
    True
  """
  if is_address(directory):
    with written(directory) as place:
      return save(pretrained, place, max_shard_bytes, format=format)
  if format not in FORMATS:
    raise InputError(
      f"There is no format {format!r} of weights; formats are "
      f"{', '.join(FORMATS)}."
    )
  # Of a model of another package there is nothing to write.
  _ = pretrained.decoder
  adapters, _ = nnx.split_state(pretrained.params, nnx.LoRAParam, ...)
  if adapters:
    raise InputError(
      "The model has adapters, which no format of weights has; merge them "
      "first (kvjax.models.lora.merge_adapters)."
    )
  directory = pathlib.Path(directory)
  try:
    _save(pretrained, directory, max_shard_bytes, format)
  except OSError as error:
    raise InputError(
      f"The model cannot be written to {directory}: {files.reason(error)}."
    ) from error


def _save(
  pretrained: Pretrained,
  directory: pathlib.Path,
  max_shard_bytes: int,
  format: str,
) -> None:
  params = pretrained.params
  failure: InputError | OSError | None = None
  together = spread(params) or format == "orbax"
  first = from_first if together else _call
  with contextlib.ExitStack() as stack:

    def begin() -> str:
      directory.mkdir(parents=True, exist_ok=True)
      # On the same file system, where moving a file is a rename.
      made = tempfile.TemporaryDirectory(
        prefix=f"{directory.name}.", dir=directory.parent
      )
      return pathlib.Path(stack.enter_context(made)).name

    scratch = directory.parent / first(begin)
    try:
      if format == "orbax":
        write_checkpoint(params, scratch)
      else:
        writes = not together or jax.process_index() == 0
        place = scratch if writes else None
        write_weights(params, pretrained.config, place, max_shard_bytes)
    except (InputError, OSError) as error:
      failure = error

    def finish() -> str:
      # Here, as the other hosts wait for it.
      if failure is not None:
        raise failure
      _describe(pretrained, scratch)
      _move(scratch, directory)
      return _CONFIG

    first(finish)
  if failure is not None:
    raise failure


def _call(act: Callable[[], str]) -> str:
  return act()


def _describe(pretrained: Pretrained, directory: pathlib.Path) -> None:
  """Writes all files but those of the weights."""
  if pretrained.tokenizer is not None:
    pretrained.tokenizer.save(directory)
  write_json(directory / _CONFIG, _config_fields(pretrained))
  write_json(
    directory / "generation_config.json",
    dict(pretrained.generation) | _token_ids(pretrained),
  )


def _move(complete: pathlib.Path, directory: pathlib.Path) -> None:
  """Moves the files of a model, in place of those of an earlier one."""
  # An old config.json must not describe new weights.
  (directory / _CONFIG).unlink(missing_ok=True)
  # Readers prefer a single file to an index, both to a checkpoint, and
  # chat_template.jinja to the tokenizer's: what an earlier save has left
  # would win.
  old = [path.name for path in directory.glob("model*.safetensors*")]
  for name in (*old, CHECKPOINT, "chat_template.jinja"):
    _remove(directory / name)
  new = {path.name for path in complete.iterdir()}
  for name in sorted(new, key=lambda name: name == _CONFIG):
    (complete / name).replace(directory / name)


def _remove(path: pathlib.Path) -> None:
  """Removes a file or a folder, if there is one."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def _config_fields(pretrained: Pretrained) -> dict[str, Any]:
  dtype = jax.tree.leaves(pretrained.params)[0].dtype
  return (
    pretrained.config.to_hf()
    | {"torch_dtype": str(dtype)}
    | _token_ids(pretrained)
  )


def _token_ids(pretrained: Pretrained) -> dict[str, Any]:
  """The ids of special tokens, as the tokenizer or the files name them."""
  tokenizer = pretrained.tokenizer
  if tokenizer is None:
    given = pretrained.generation
    return {name: given[name] for name in TOKEN_IDS if name in given}
  ids = {
    "bos_token_id": tokenizer.bos_id,
    "eos_token_id": list(tokenizer.eos_ids),
    "pad_token_id": tokenizer.pad_id,
  }
  return {name: value for name, value in ids.items() if value is not None}
