"""Activations of a prompt, and attention weights and unit vectors from them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.engine.forward import attend_to_prompt, hidden_states
from kvjax.model import Model

# Shorter vectors are as good as zero, and stay so.
_LEAST = 1e-12


def activations(
  model: Model, params: PyTree, tokens: Sequence[int]
) -> tuple[Activations, ...]:
  """Computes queries, keys and values of every layer for one prompt."""
  return _activations(model, params, jnp.asarray([tokens], jnp.int32))


@functools.partial(jax.jit, static_argnames=("model",))
def _activations(
  model: Model, params: PyTree, tokens: Int[Array, "B S"]
) -> tuple[Activations, ...]:
  def attend(
    layer: int, state: None, layer_activations: Activations
  ) -> tuple[Float[Array, "B N S D"], Activations]:
    del layer, state
    # Drop optional activations, so that they are not computed.
    return attend_to_prompt(layer_activations), layer_activations.only(())

  index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(index[None], tokens.shape)
  none = (None,) * model.geometry.num_layers
  return hidden_states(model, params, tokens, positions, none, attend)[1]


def kv_head_weights(
  layer: Activations, head: int, tokens: int, causal: bool
) -> Float[np.ndarray, "T T"]:
  """Computes the weights among the first tokens of the first row.

  Args:
    layer: activations of a layer.
    head: a KV head; the weights are the mean over its query heads.
    tokens: number of tokens.
    causal: whether queries see only the keys before them.
  """
  group = layer.queries.shape[1] // layer.keys.shape[1]
  keys = np.asarray(layer.keys[0, head, :tokens], np.float64)
  queries = np.asarray(
    layer.queries[0, head * group : (head + 1) * group, :tokens], np.float64
  )
  return np.mean([weights(own, keys, causal) for own in queries], axis=0)


def weights(
  queries: Float[np.ndarray, "S D"],
  keys: Float[np.ndarray, "T D"],
  causal: bool,
) -> Float[np.ndarray, "S T"]:
  """Computes softmax(q.k / sqrt(D)) over all keys, or over those before."""
  logits = queries @ keys.T / np.sqrt(queries.shape[1])
  if causal:
    logits = np.where(np.tri(*logits.shape) > 0, logits, -np.inf)
  return scipy.special.softmax(logits, axis=1)


def unit(x: Float[np.ndarray, "*A D"]) -> Float[np.ndarray, "*A D"]:
  """Scales rows to length 1; zero rows stay zero."""
  return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), _LEAST)
