"""How retrieval methods rank keys: attention weights, and the best slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.select import largest
from kvjax.retrieval.base import KeyBudget


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


def best_slots(
  scores: Float[Array, "*B F"], valid: Bool[Array, "*B F"], budget: KeyBudget
) -> Int[Array, "*B M"]:
  """Valid slots with the highest scores, in ascending order, then -1.

  Equal scores prefer the lower slot.
  """
  most = min(budget.max_keys, scores.shape[-1])
  scores = jnp.where(valid, scores, -jnp.inf)
  return largest(scores, budget.num_keys, most)
