"""Loads models, and saves them in the layout of Hugging Face directories."""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.engine.sampling import GREEDY, Sampling
from kvjax.errors import InputError
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.json_files import write_json
from kvjax.models.language_model import DecoderModel, from_decoder
from kvjax.models.sharding import param_shardings
from kvjax.models.sources import Source, find
from kvjax.models.tokenizer import Tokenizer
from kvjax.models.weights import read_weights, write_weights

DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A model with all that its directory or file holds.

  Attributes:
    model: the pure functions that the engine calls.
    params: the weights.
    config: sizes and options.
    tokenizer: text to ids and back, if the directory has one.
    generation: fields of generation_config.json, kept for `save`.
  """

  model: DecoderModel
  params: nnx.State
  config: DecoderConfig
  tokenizer: Tokenizer | None
  generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def text(self) -> Tokenizer:
    """The tokenizer, for what works on text.

    Raises:
      InputError: there is none.
    """
    if self.tokenizer is None:
      raise InputError(
        "This model has no tokenizer, which texts need; put its tokenizer.json "
        "into its directory."
      )
    return self.tokenizer

  @property
  def sampling(self) -> Sampling:
    """How the model's makers sample from it; greedy unless they say so.

    Of their settings temperature, top_k and top_p count; penalties do not.
    """
    given = {k: v for k, v in self.generation.items() if v is not None}
    if not given.get("do_sample", False):
      return GREEDY
    return Sampling(
      temperature=float(given.get("temperature", 1.0)),
      top_k=int(given.get("top_k", 0)),
      top_p=float(given.get("top_p", 1.0)),
    )


def load(
  model: str | os.PathLike[str],
  dtype: str | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> Pretrained:
  """Loads a model, its generation defaults, and its tokenizer if it has one.

  Args:
    model: a Hugging Face directory (config.json, safetensors weights,
      tokenizer.json and what goes with them), a GGUF file, a directory with
      one, or a name of `kvjax.models.catalog.NAMED`, which is fetched first.
    dtype: one of `DTYPES`, for the weights and the computation; by default
      bfloat16, and float32 for what is dequantized from a GGUF file.
    mesh: has an axis "model" over which the weights are sharded (see
      `kvjax.models.sharding`); without it they go to the default device.

  Raises:
    InputError: something is missing, broken or not supported, or a named model
      cannot be fetched; see `load_decoder` and `Tokenizer.load`.
  """
  source = find(model)
  config = source.config()
  tokenizer = source.tokenizer(config)
  decoder, params = _read_decoder(source, config, dtype, mesh)
  return Pretrained(decoder, params, config, tokenizer, source.generation())


def load_decoder(
  model: str | os.PathLike[str],
  dtype: str | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[DecoderModel, nnx.State]:
  """Loads a model's functions and weights alone; arguments as for `load`.

  Raises:
    InputError: the model, its configuration or its weights are missing, broken
      or not supported.
  """
  source = find(model)
  return _read_decoder(source, source.config(), dtype, mesh)


def save(
  pretrained: Pretrained,
  directory: str | os.PathLike[str],
  max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a directory that `load` and transformers read.

  Everything is written beside the directory first and moved in when whole.
  Files that the directory already holds under these names, and its old
  weights, are replaced; others stay.

  Args:
    pretrained: what to write; weights keep their dtype.
    directory: made if need be.
    max_shard_bytes: larger weights become several files.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    prefix=f"{directory.name}.", dir=directory.parent
  ) as scratch:
    whole = pathlib.Path(scratch)
    write_weights(pretrained.params, whole, max_shard_bytes)
    if pretrained.tokenizer is not None:
      pretrained.tokenizer.save(whole)
    write_json(whole / "config.json", _config_fields(pretrained))
    write_json(
      whole / "generation_config.json",
      dict(pretrained.generation) | _token_ids(pretrained.tokenizer),
    )
    new = {path.name for path in whole.iterdir()}
    for name in new:
      (whole / name).replace(directory / name)
    stale = {path.name for path in directory.glob("model*.safetensors*")}
    for name in (stale | {"chat_template.jinja"}) - new:
      (directory / name).unlink(missing_ok=True)


def _read_decoder(
  source: Source,
  config: DecoderConfig,
  dtype: str | None,
  mesh: jax.sharding.Mesh | None,
) -> tuple[DecoderModel, nnx.State]:
  dtype = source.dtype if dtype is None else dtype
  if dtype not in DTYPES:
    raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
  model, template = from_decoder(
    nnx.eval_shape(
      lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    )
  )
  shardings = None
  if mesh is not None:
    shardings = param_shardings(template, model.geometry, mesh)
  return model, read_weights(source.tensors(config), template, shardings)


def _config_fields(pretrained: Pretrained) -> dict[str, Any]:
  dtype = jax.tree.leaves(pretrained.params)[0].dtype
  return (
    pretrained.config.to_hf()
    | {"torch_dtype": str(dtype)}
    | _token_ids(pretrained.tokenizer)
  )


def _token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
  if tokenizer is None:
    return {}
  ids = {
    "bos_token_id": tokenizer.bos_id,
    "eos_token_id": list(tokenizer.eos_ids),
    "pad_token_id": tokenizer.pad_id,
  }
  return {name: value for name, value in ids.items() if value is not None}
