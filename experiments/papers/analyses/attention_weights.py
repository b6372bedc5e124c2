"""Attention weights of a prompt's first tokens, as whole matrices."""

import numpy as np
import scipy.special
from jaxtyping import Float

from kvjax.activations import Activations


def of_kv_head(
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
