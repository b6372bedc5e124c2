"""Methods that judge one KV head at a time, and what a head offers them."""

import abc
import dataclasses
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.layers import LayerCache
from kvjax.methods.base import ScoringMethod
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
    block_keys_unrotated: the block's keys before RoPE; padding holds anything.
    received: attention received so far, the block's included, if remembered.
    window_queries: the last W queries so far, the block's included, and
    window_positions: their places, if remembered.
  """

  cached_keys: Float[Array, "*B T D"]
  cached_values: Float[Array, "*B T D"]
  positions: Int[Array, "*B T"]
  queries: Float[Array, "*B G S D"]
  query_positions: Int[Array, "*B S"]
  block_keys_unrotated: Float[Array, "*B S D"]
  received: Float[Array, "*B T"] | None = None
  window_queries: Float[Array, "*B G W D"] | None = None
  window_positions: Int[Array, "*B W"] | None = None

  @property
  def held(self) -> Bool[Array, "*B T"]:
    """Slots that hold a token."""
    return self.positions >= 0

  @property
  def keys(self) -> Float[Array, "*B T D"]:
    """Float32 keys; empty slots are zero."""
    keys = self.cached_keys.astype(jnp.float32)
    return jnp.where(self.held[..., None], keys, 0.0)

  @property
  def values(self) -> Float[Array, "*B T D"]:
    """Float32 values; empty slots are zero."""
    values = self.cached_values.astype(jnp.float32)
    return jnp.where(self.held[..., None], values, 0.0)


@dataclasses.dataclass(frozen=True)
class HeadwiseMethod(ScoringMethod):
  """A method whose score is a function of one head, vmapped over the rest."""

  @abc.abstractmethod
  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Float32 worth of every slot of one head."""

  @final
  def scores(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K T"]:
    """Vmaps `score_head` over rows and KV heads."""
    del layer
    return jax.vmap(jax.vmap(self.score_head))(heads_of(cache, seen))


def heads_of(cache: LayerCache, seen: Activations) -> Head:
  """All heads of a layer as one tree with leading axes B and K."""
  batch, heads, length, dim = seen.queries.shape
  kv_heads = cache.positions.shape[1]
  group = heads // kv_heads
  window = cache.window

  def per_head(positions: Int[Array, "B S"]) -> Int[Array, "B K S"]:
    shape = (batch, kv_heads, positions.shape[1])
    return jnp.broadcast_to(positions[:, None], shape)

  return Head(
    cached_keys=cache.keys,
    cached_values=cache.values,
    positions=cache.positions,
    queries=seen.queries.reshape(batch, kv_heads, group, length, dim),
    query_positions=per_head(seen.positions),
    block_keys_unrotated=seen.keys_unrotated,
    received=cache.received,
    window_queries=None
    if window is None
    else window.queries.reshape(batch, kv_heads, group, -1, dim),
    window_positions=None if window is None else per_head(window.positions),
  )


def window_queries(
  head: Head, window: int
) -> tuple[Float[Array, "G W D"], Int[Array, " W"]]:
  """The last real queries in float32, and their positions.

  Args:
    head: one head; what it remembers goes before what the block holds.
    window: how many; all of the block's where it is shorter. Where the row is
      shorter, the rest are zero, with position -1.
  """
  if head.window_queries is not None and head.window_positions is not None:
    places = head.window_positions
    queries = head.window_queries.astype(jnp.float32)
    return jnp.where((places >= 0)[None, :, None], queries, 0.0), places
  length = head.query_positions.shape[0]
  size = min(window, length)
  real = jnp.sum((head.query_positions >= 0).astype(jnp.int32))
  start = jnp.clip(real - size, 0, length - size)
  take = jax.lax.dynamic_slice_in_dim
  places = take(head.query_positions, start, size, axis=0)
  queries = take(head.queries, start, size, axis=1).astype(jnp.float32)
  return jnp.where((places >= 0)[None, :, None], queries, 0.0), places


def window_attention(head: Head, window: int) -> Float[Array, "G W T"]:
  """Causal softmax weights of the window's queries over all slots.

  Queries that do not exist have zero weights; see `window_queries`.
  """
  queries, places = window_queries(head, window)
  logits = jnp.einsum("gwd,td->gwt", queries, head.keys)
  logits = logits * queries.shape[-1] ** -0.5
  seen = head.held[None] & (head.positions[None] <= places[:, None])
  weights = jax.nn.softmax(logits, axis=-1, where=seen[None])
  return jnp.where(seen[None], weights, 0.0)
