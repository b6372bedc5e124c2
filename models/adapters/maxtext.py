"""Checkpoints of MaxText."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from kvjax.errors import InputError
from kvjax.models.adapters.assembly import assemble
from kvjax.models.adapters.maxtext_checkpoint import restore
from kvjax.models.adapters.maxtext_names import MODULES, TOP, convert, find_path
from kvjax.models.adapters.parameters import Parameters, Stored, stack
from kvjax.models.config import DecoderConfig
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer


def from_maxtext(
  checkpoint: str | os.PathLike[str] | PyTree,
  config: DecoderConfig,
  *,
  scan_axis: int = 1,
  dtype: DTypeLike | None = None,
  mesh: jax.sharding.Mesh | None = None,
  tokenizer: Tokenizer | None = None,
) -> Pretrained:
  """Makes a model of a checkpoint of MaxText, with scanned layers or without.

  Of a state of training, the parameters alone are read, to the host; they are
  converted there one at a time, and go to their devices once.

  Written against maxtext 0.2.5, which is not imported. The checkpoint must be
  as its scripts convert models of Hugging Face; they scale the queries of Llama
  and Mistral and the embedding of Gemma, which is undone.

  Args:
    checkpoint: the folder of a step, or its folder `items`, as orbax writes it;
      or the tree of parameters that it holds.
    config: `kvjax.models.config.DecoderConfig.from_hf` of the config.json of
      the same model; a checkpoint of MaxText does not say what it holds.
    scan_axis: axis of scanned layers, MaxText's `param_scan_axis`.
    dtype: dtype of the weights; by default that of the embedding.
    mesh: as for `kvjax.models.load`.
    tokenizer: the tokenizer, if there is one.

  Raises:
    InputError: the checkpoint cannot be read, MaxText has no such family, or
      parameters are missing, unknown, or of other shapes or for another number
      of layers than the config says.
  """
  if config.model_type not in MODULES:
    raise InputError(
      f"Of MaxText, kvjax reads {', '.join(MODULES)}; the config is of "
      f"{config.model_type}."
    )
  if scan_axis < 0:
    raise InputError(f"scan_axis is {scan_axis}; it must be 0 or more.")
  tree: Any = checkpoint
  if isinstance(tree, str | os.PathLike):
    tree = restore(pathlib.Path(tree))
  while isinstance(tree, dict) and "params" in tree:
    tree = tree["params"]
  params = Parameters(tree, "MaxText")
  # Gemma and gpt-oss scan over blocks of layers.
  blocks = {
    path.split("/")[2]
    for path in params.paths()
    if path.startswith("decoder/layers/layers_")
  }

  period = max(len(blocks), 1)
  remainder = len(
    {
      path.split("/")[2]
      for path in params.paths()
      if path.startswith("decoder/layers_remainder/")
    }
  )
  scanned = any(path.startswith("decoder/layers/") for path in params.paths())

  def in_layer(path: str, layer: int) -> Stored:
    if not scanned:
      return params[f"decoder/layers_{layer}/{path}"]
    block = f"layers_{layer % period}/" if blocks else ""
    whole = f"decoder/layers/{block}{path}"
    scan = params[whole]
    count = scan.shape[scan_axis] if scan_axis < scan.ndim else 0
    if period * count + remainder != config.num_layers:
      raise InputError(
        f"The parameter {whole} has the shape {scan.shape}, which with "
        f"layers along axis {scan_axis} makes {period * count + remainder} "
        f"layers, where the config asks for {config.num_layers}."
      )
    if layer < period * count:
      # Of an array on the host, this is a view.
      return scan[(slice(None),) * scan_axis + (layer // period,)]
    # Layers that fill no block.
    rest = layer - period * count
    return params[f"decoder/layers_remainder/layers_{rest}/{path}"]

  def find(name: str, layers: Sequence[int]) -> Stored:
    if layers:
      path = find_path(config, name)
      found = stack([in_layer(path, layer) for layer in layers])
    else:
      found = params[TOP[name]]
    # MaxText may pad the vocabulary.
    if name == "embed_tokens.embedding":
      found = found[: config.vocab_size]
    if name == "lm_head.kernel":
      found = found[:, : config.vocab_size]
    return convert(config, name, found)

  lm = assemble(config, find, dtype, mesh, tokenizer)
  params.skip("vision_encoder/")
  params.refuse_rest()
  return lm
