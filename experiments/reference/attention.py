"""Causal attention for training on a CPU, with its own backward pass.

The backward pass recomputes the weights from their log-sum-exp (Dao et al.,
FlashAttention, 2022, algorithm 4), so no T x T matrix is stored. Only narrow
matrices are transposed, because XLA copies transposed operands.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.activations import Activations

# Queries per block, so that a block's scores fit in a core's cache.
_BLOCK = 128

_Saved = tuple[Array, Array, Array, Array, Array]


def causal_attention(activations: Activations) -> Float[Array, "B N S D"]:
  """Computes causal attention of unpadded rows, in blocks of queries."""
  batch, heads, length, dim = activations.queries.shape
  rows = batch * activations.keys.shape[1]
  mixed = _attention(
    activations.queries.reshape(rows, -1, length, dim) * dim**-0.5,
    activations.keys.reshape(rows, length, dim),
    activations.values.reshape(rows, length, dim),
  )
  return mixed.reshape(batch, heads, length, dim)


@jax.custom_vjp
def _attention(
  queries: Float[Array, "R G T D"],
  keys: Float[Array, "R T D"],
  values: Float[Array, "R T D"],
) -> Float[Array, "R G T D"]:
  return _forward(queries, keys, values)[0]


def _forward(
  queries: Float[Array, "R G T D"],
  keys: Float[Array, "R T D"],
  values: Float[Array, "R T D"],
) -> tuple[Float[Array, "R G T D"], _Saved]:
  keys_t = jnp.swapaxes(keys, 1, 2)
  outputs, masses = [], []
  for start, end in _blocks(queries.shape[2]):
    shape = queries[:, :, start:end].shape
    scores = _scores(queries, keys_t, start, end)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    outputs.append((weights @ values[:, :end] / total).reshape(shape))
    masses.append((top + jnp.log(total)).reshape(*shape[:3], 1))
  output = jnp.concatenate(outputs, axis=2)
  saved = (queries, keys, values, output, jnp.concatenate(masses, axis=2))
  return output, saved


def _backward(
  saved: _Saved, gradient: Float[Array, "R G T D"]
) -> tuple[Array, Array, Array]:
  queries, keys, values, output, masses = saved
  keys_t, values_t = jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)
  shares = (gradient * output).sum(-1, keepdims=True)
  for_queries = []
  for_keys, for_values = jnp.zeros_like(keys_t), jnp.zeros_like(values_t)
  for start, end in _blocks(queries.shape[2]):
    mass, share, query_block, wanted = (
      _rows(x, start, end) for x in (masses, shares, queries, gradient)
    )
    weights = jnp.exp(_scores(queries, keys_t, start, end) - mass)
    change = weights * (wanted @ values_t[:, :, :end] - share)
    for_queries.append(
      (change @ keys[:, :end]).reshape(queries[:, :, start:end].shape)
    )
    for_keys = for_keys.at[:, :, :end].add(
      jnp.swapaxes(query_block, 1, 2) @ change
    )
    for_values = for_values.at[:, :, :end].add(
      jnp.swapaxes(wanted, 1, 2) @ weights
    )
  return (
    jnp.concatenate(for_queries, axis=2),
    jnp.swapaxes(for_keys, 1, 2),
    jnp.swapaxes(for_values, 1, 2),
  )


_attention.defvjp(_forward, _backward)


def _blocks(length: int) -> list[tuple[int, int]]:
  starts = range(0, length, _BLOCK)
  return [(start, min(length, start + _BLOCK)) for start in starts]


def _rows(
  x: Float[Array, "R G T D"], start: int, end: int
) -> Float[Array, "R M D"]:
  """Stacks a block's rows of all query heads."""
  return x[:, :, start:end].reshape(x.shape[0], -1, x.shape[3])


def _scores(
  queries: Float[Array, "R G T D"],
  keys_t: Float[Array, "R D T"],
  start: int,
  end: int,
) -> Float[Array, "R M S"]:
  """Computes masked scores of a block of queries over keys up to its end."""
  hidden = np.arange(end) > np.arange(start, end)[:, None]
  mask = np.where(hidden, -1e9, 0.0).astype(np.float32)
  mask = np.tile(mask, (queries.shape[1], 1))
  return _rows(queries, start, end) @ keys_t[:, :, :end] + mask[None]
