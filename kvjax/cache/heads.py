"""The view of a layer's cache by KV head."""

import jax.numpy as jnp

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.heads import Head, by_kv_head


def heads_of(cache: LayerCache, activations: Activations) -> Head:
  """Returns all heads of a layer as one tree with leading axes B and K."""
  batch, _, length, _ = activations.queries.shape
  kv_heads = cache.positions.shape[1]
  query_positions = activations.query_positions[:, None]
  return Head(
    cached_keys=cache.keys,
    cached_values=cache.values,
    positions=cache.positions,
    queries=by_kv_head(activations.queries, kv_heads),
    query_positions=jnp.broadcast_to(
      query_positions, (batch, kv_heads, length)
    ),
  )
