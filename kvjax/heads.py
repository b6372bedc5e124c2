"""The view of one KV head for scoring and retrieval."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.struct import struct


@struct
class Head:
  """One KV head of one row.

  Compute scores from `keys`, `values`, `positions` and the queries. Tokens are
  in the order of their positions, the oldest first. Some slots may be empty, at
  the end or between tokens: `valid` is False there, and keys and values are
  zero, so take means over valid slots only. `cached_keys` and `cached_values`
  are what the cache stores, and may be NaN in empty slots.

  Attributes:
    cached_keys: rotated keys in the cache's dtype; arbitrary in empty slots.
    cached_values: values in the cache's dtype; arbitrary in empty slots.
    positions: position of each token in its row, -1 for empty.
    queries: rotated queries of the G query heads of this KV head: all of a
      prompt that is read as a whole. Between blocks and while decoding, and to
      methods whose traits say that they do not read them, S is 0.
    query_positions: position of each query, -1 for padding.
  """

  cached_keys: Float[Array, "*B T D"]
  cached_values: Float[Array, "*B T Dv"]
  positions: Int[Array, "*B T"]
  queries: Float[Array, "*B G S D"]
  query_positions: Int[Array, "*B S"]

  @property
  def valid(self) -> Bool[Array, "*B T"]:
    """Mask of the slots that contain a token."""
    return self.positions >= 0

  @property
  def keys(self) -> Float[Array, "*B T D"]:
    """Float32 keys; zero in empty slots."""
    # A product with the mask would keep the NaN of an empty slot.
    keys = self.cached_keys.astype(jnp.float32)
    return jnp.where(self.valid[..., None], keys, 0.0)

  @property
  def values(self) -> Float[Array, "*B T Dv"]:
    """Float32 values; zero in empty slots."""
    values = self.cached_values.astype(jnp.float32)
    return jnp.where(self.valid[..., None], values, 0.0)


def by_kv_head(
  x: Float[Array, "B N *D"], kv_heads: int
) -> Float[Array, "B K G *D"]:
  """Groups query heads by the KV head that they read."""
  batch, heads, *rest = x.shape
  return x.reshape(batch, kv_heads, heads // kv_heads, *rest)
