"""What one KV head of a layer is to scores and lookups."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.struct import struct


@struct
class Head:
  """What one KV head of one row offers for scoring.

  Attributes:
    cached_keys: rotated keys in the cache's dtype; empty slots hold anything.
    cached_values: values, likewise.
    positions: each token's place in its row, -1 for empty.
    queries: the block's rotated queries of the G heads that read this head.
    query_positions: place of each query, -1 for padding.
  """

  cached_keys: Float[Array, "*B T D"]
  cached_values: Float[Array, "*B T Dv"]
  positions: Int[Array, "*B T"]
  queries: Float[Array, "*B G S D"]
  query_positions: Int[Array, "*B S"]

  @property
  def valid(self) -> Bool[Array, "*B T"]:
    """Slots that hold a token."""
    return self.positions >= 0

  @property
  def keys(self) -> Float[Array, "*B T D"]:
    """Float32 keys; empty slots are zero."""
    keys = self.cached_keys.astype(jnp.float32)
    return jnp.where(self.valid[..., None], keys, 0.0)

  @property
  def values(self) -> Float[Array, "*B T Dv"]:
    """Float32 values; empty slots are zero."""
    values = self.cached_values.astype(jnp.float32)
    return jnp.where(self.valid[..., None], values, 0.0)


def by_kv_head(
  x: Float[Array, "B N *D"], kv_heads: int
) -> Float[Array, "B K G *D"]:
  """What query heads have, by the KV head that they read."""
  return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])
