"""Attention weights by which retrieval methods rank keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def max_attention(
  queries: Float[Array, "G D"],
  keys: Float[Array, "T D"],
  visible: Bool[Array, " T"],
) -> Float[Array, " T"]:
  """Maximum attention weight of each key over the heads; -inf if not visible.

  The weights are those of `max_weights` for `scaled_logits`.
  """
  return max_weights(scaled_logits(queries, keys), visible)


def scaled_logits(
  queries: Float[Array, "*B G D"], keys: Float[Array, "*B T D"]
) -> Float[Array, "*B G T"]:
  """Products of queries and keys, times D^-1/2."""
  scale: float = queries.shape[-1] ** -0.5
  return jnp.einsum("...gd,...td->...gt", queries, keys) * scale


def max_weights(
  logits: Float[Array, "G T"], visible: Bool[Array, " T"]
) -> Float[Array, " T"]:
  """Maximum weight of each key over the heads; -inf if it is not visible.

  The weights are the softmax of the logits over the visible keys.
  """
  # Before the maximum: heads are only comparable as weights, not as logits.
  weights = jax.nn.softmax(logits, axis=-1, where=visible)
  return jnp.where(visible, jnp.max(weights, axis=0), -jnp.inf)
