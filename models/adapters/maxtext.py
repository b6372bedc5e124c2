"""Checkpoints of MaxText."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree

from kvjax import files
from kvjax.errors import InputError
from kvjax.models.adapters.assembly import Parameters, assemble
from kvjax.models.config import DecoderConfig
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer

_TOP = {
  "embed_tokens.embedding": "token_embedder/embedding",
  "norm.scale": "decoder/decoder_norm/scale",
  "lm_head.kernel": "decoder/logits_dense/kernel",
}
# Parts of names in a layer, one after the other.
_ATTENTION = {
  "q_proj": "query",
  "k_proj": "key",
  "v_proj": "value",
  "o_proj": "out",
  "q_norm": "query_norm",
  "k_norm": "key_norm",
}
_MLP = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
_NORMS = {
  "input_layernorm": "pre_self_attention_layer_norm",
  "post_attention_layernorm": "post_self_attention_layer_norm",
  "post_feedforward_layernorm": "post_mlp_layer_norm",
}
_GEMMA_NORMS = {
  "input_layernorm": "pre_self_attention_norm",
  "post_attention_layernorm": "post_self_attention_norm",
  "pre_feedforward_layernorm": "pre_ffw_norm",
  "post_feedforward_layernorm": "post_ffw_norm",
}
# What a layer calls its attention and its MLP, by the model type.
MODULES = {
  "llama": ("self_attention", "mlp"),
  "mistral": ("self_attention", "mlp"),
  "qwen2": ("self_attention", "mlp"),
  "qwen3": ("self_attention", "mlp"),
  "qwen3_moe": ("self_attention", "moe_block"),
  "gemma3_text": ("self_attention", "mlp"),
  "gpt_oss": ("GptOssAttention", "GptOssMlp"),
  "olmo3": ("attention", "mlp"),
}


def from_maxtext(
  checkpoint: str | os.PathLike[str] | PyTree,
  config: DecoderConfig,
  *,
  scan_axis: int = 1,
  dtype: str | None = None,
  mesh: jax.sharding.Mesh | None = None,
  tokenizer: Tokenizer | None = None,
) -> Pretrained:
  """Makes a model of a checkpoint of MaxText, with scanned layers or without.

  Of a state of training, the parameters alone are read, to the host; they are
  converted one at a time.

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
      parameters are missing, unknown, or of other sizes than the config says.
  """
  if config.model_type not in MODULES:
    raise InputError(
      f"Of MaxText, kvjax reads {', '.join(MODULES)}; the config is of "
      f"{config.model_type}."
    )
  tree: Any = checkpoint
  if isinstance(tree, str | os.PathLike):
    tree = _restore(pathlib.Path(tree))
  while isinstance(tree, dict) and "params" in tree:
    tree = tree["params"]
  params = Parameters(tree, "MaxText")
  # Gemma and gpt-oss scan over blocks of layers.
  blocks = {
    path.split("/")[2]
    for path in params.paths()
    if path.startswith("decoder/layers/layers_")
  }

  def in_layer(path: str, layer: int) -> Array:
    if f"decoder/layers_{layer}/{path}" in params:
      return params[f"decoder/layers_{layer}/{path}"]
    period = max(len(blocks), 1)
    block = f"layers_{layer % period}/" if blocks else ""
    scanned = params[f"decoder/layers/{block}{path}"]
    index, count = layer // period, scanned.shape[scan_axis]
    if index < count:
      return jax.lax.index_in_dim(scanned, index, scan_axis, keepdims=False)
    # Layers that fill no block.
    rest = layer - period * count
    return params[f"decoder/layers_remainder/layers_{rest}/{path}"]

  def find(name: str, layers: Sequence[int]) -> Array:
    if layers:
      path = _path(config, name)
      found = jnp.stack([in_layer(path, layer) for layer in layers])
    else:
      found = params[_TOP[name]]
    if name == "embed_tokens.embedding":
      # MaxText may pad the vocabulary.
      found = found[: config.vocab_size]
    return _convert(config, name, found)

  lm = assemble(config, find, dtype, mesh, tokenizer)
  params.skip("vision_encoder/")
  params.refuse_rest()
  return lm


def _path(config: DecoderConfig, name: str) -> str:
  """Path in a layer of a parameter by its name in the decoder."""
  attention, mlp = MODULES[config.model_type]
  module, *rest, kind = name.split(".")
  if module == "self_attn":
    if not rest:
      return f"{attention}/{kind}"
    return f"{attention}/{_ATTENTION[rest[0]]}/{kind}"
  if module != "mlp":
    norms = _GEMMA_NORMS if config.model_type == "gemma3_text" else _NORMS
    return f"{norms[module]}/{kind}"
  if rest[0] == "router":
    return f"{mlp}/gate/{kind}"
  if rest[0] == "experts":
    return f"{mlp}/{_MLP[rest[1]]}{'_bias' if kind == 'bias' else ''}"
  return f"{mlp}/{_MLP[rest[0]]}/{kind}"


def _convert(config: DecoderConfig, name: str, found: Array) -> Array:
  """Undoes what MaxText changes in parameters."""
  dtype, wide = found.dtype, found.astype(jnp.float32)
  if config.model_type == "gemma3_text":
    if name.endswith(".scale"):
      return (wide - 1.0).astype(dtype)
    if name == "embed_tokens.embedding":
      factor = jnp.asarray(config.hidden_size**0.5, jnp.bfloat16)
      return (wide / factor.astype(jnp.float32)).astype(dtype)
  if config.model_type in ("llama", "mistral"):
    is_query = name == "self_attn.q_proj.kernel"
    if is_query:
      found = (wide * config.head_dim**0.5).astype(dtype)
    if config.rope.kind == "llama3" and (is_query or ".k_proj." in name):
      # With this scaling, MaxText rotates neighboring channels.
      return jnp.concatenate([found[..., ::2], found[..., 1::2]], axis=-1)
  return found


def _restore(directory: pathlib.Path) -> PyTree:
  """Reads the parameters of a checkpoint to the host.

  Raises:
    InputError: there is none, or it cannot be read.
  """
  folder = (directory / "items").resolve()
  folder = folder if folder.is_dir() else directory.resolve()
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      tree = checkpointer.metadata(folder).item_metadata.tree
      wanted = {"params": tree["params"]}
      to_host = ocp.RestoreArgs(restore_type=np.ndarray)
      restored: PyTree = checkpointer.restore(
        folder,
        ocp.args.PyTreeRestore(
          wanted,
          jax.tree.map(lambda _: to_host, wanted),
          partial_restore=True,
        ),
      )
      return restored
  except (OSError, KeyError, ValueError, AttributeError, TypeError) as error:
    raise InputError(
      f"{directory} is no checkpoint of MaxText that orbax can read "
      f"({files.reason(error)}); give the folder of a step."
    ) from error
