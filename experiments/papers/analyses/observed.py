"""Activations of a prompt, and attention weights and unit vectors from them."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax import openblas
from kvjax.activations import Activations
from kvjax.engine.forward import (
  attend_to_prompt,
  block_positions,
  hidden_states,
)
from kvjax.heads import by_kv_head
from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.model import Model
from kvjax.models.pretrained import Pretrained
from kvjax.prompts import bucket

# Shorter vectors are as good as zero, and stay so.
_LEAST = 1e-12


def activations(
  lm: Pretrained, tokens: Sequence[int]
) -> tuple[Activations, ...]:
  """Computes queries, keys and values of every layer for one prompt.

  Prompts of a bucket share a compiled program.
  """
  length = len(tokens)
  padded = np.zeros((1, bucket(length)), np.int32)
  padded[0, :length] = tokens
  lengths = np.array([length], np.int32)
  return tuple(
    dataclasses.replace(
      layer,
      queries=layer.queries[:, :, :length],
      keys=layer.keys[:, :, :length],
      values=layer.values[:, :, :length],
      positions=layer.positions[:, :length],
    )
    for layer in _activations(lm.model, lm.params, padded, lengths)
  )


@functools.partial(jax.jit, static_argnames=("model",))
def _activations(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
) -> tuple[Activations, ...]:
  def attend(
    layer: int, state: None, layer_activations: Activations
  ) -> tuple[Float[Array, "B N S D"], Activations]:
    del layer, state
    # Drop optional activations, so that they are not computed.
    return attend_to_prompt(layer_activations), layer_activations.only(())

  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  none = (None,) * model.geometry.num_layers
  return hidden_states(model, params, tokens, positions, none, attend)[1]


def kv_head(
  layer: Activations, head: int
) -> tuple[Float[np.ndarray, "T D"], Float[np.ndarray, "G T D"]]:
  """Returns the keys of a KV head and its group's queries, in the first row."""
  queries = by_kv_head(layer.queries, layer.keys.shape[1])[0, head]
  keys = np.asarray(layer.keys[0, head], np.float64)
  return keys, np.asarray(queries, np.float64)


def kv_head_weights(
  layer: Activations, head: int, tokens: int, causal: bool
) -> Float[np.ndarray, "T T"]:
  """Computes the weights among the first tokens of the first row.

  Args:
    layer: activations of a layer.
    head: a KV head; the weights are the mean over its query heads.
    tokens: number of tokens.
    causal: whether queries see only the keys before them, and of these only
      those of the layer's window.
  """
  keys, queries = kv_head(layer, head)
  group = len(queries)
  sinks = np.full(group, -np.inf)
  if layer.sinks is not None:
    sinks = np.asarray(layer.sinks, np.float64).reshape(-1, group)[head]
  return np.mean(
    [
      weights(own[:tokens], keys[:tokens], causal, layer.attention, sink)
      for own, sink in zip(queries, sinks, strict=True)
    ],
    axis=0,
  )


def weights(
  queries: Float[np.ndarray, "S D"],
  keys: Float[np.ndarray, "T D"],
  causal: bool,
  options: AttentionOptions = PLAIN,
  sink: float = -np.inf,
) -> Float[np.ndarray, "S T"]:
  """Computes a head's weights of all keys, or of those that queries see.

  Args:
    queries: the queries.
    keys: the keys.
    causal: whether queries see only the keys before them, in the window.
    options: scale, softcap and window.
    sink: logit of the attention sink; -inf for none.
  """
  logits = queries @ keys.T * options.scale_of(queries.shape[1])
  if options.softcap is not None:
    logits = options.softcap * np.tanh(logits / options.softcap)
  if causal:
    ages = np.arange(len(queries))[:, None] - np.arange(len(keys))[None]
    visible = ages >= 0
    if options.window is not None:
      visible &= ages < options.window
    logits = np.where(visible, logits, -np.inf)
  logits = np.pad(logits, ((0, 0), (0, 1)), constant_values=sink)
  return softmax(logits)[:, :-1]


def softmax(logits: Float[np.ndarray, "*A T"]) -> Float[np.ndarray, "*A T"]:
  """Computes weights along the last axis in the precision of the logits."""
  openblas.load()
  from scipy import special

  weights: Float[np.ndarray, "*A T"] = special.softmax(logits, axis=-1)
  return weights


def unit(x: Float[np.ndarray, "*A D"]) -> Float[np.ndarray, "*A D"]:
  """Scales rows to length 1; zero rows stay zero."""
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), _LEAST)
