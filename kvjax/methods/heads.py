"""What a KV head, and the last queries of a layer, offer to methods."""

import abc
import dataclasses
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.kernels.attention_mass import causal_mass
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
  """

  cached_keys: Float[Array, "*B T D"]
  cached_values: Float[Array, "*B T Dv"]
  positions: Int[Array, "*B T"]
  queries: Float[Array, "*B G S D"]
  query_positions: Int[Array, "*B S"]

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
  def values(self) -> Float[Array, "*B T Dv"]:
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
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Vmaps `score_head` over rows and KV heads."""
    del layer
    return jax.vmap(jax.vmap(self.score_head))(heads_of(cache, activations))


def heads_of(cache: LayerCache, activations: Activations) -> Head:
  """All heads of a layer as one tree with leading axes B and K."""
  batch, length = activations.positions.shape
  kv_heads = cache.positions.shape[1]
  return Head(
    cached_keys=cache.keys,
    cached_values=cache.values,
    positions=cache.positions,
    queries=by_kv_head(activations.queries, kv_heads),
    query_positions=jnp.broadcast_to(
      activations.positions[:, None], (batch, kv_heads, length)
    ),
  )


def by_kv_head(
  x: Float[Array, "B N *D"], kv_heads: int
) -> Float[Array, "B K G *D"]:
  """What query heads have, by the KV head that they read."""
  return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def window_queries(
  cache: LayerCache, activations: Activations, window: int
) -> tuple[Float[Array, "B N W D"], Int[Array, "B W"]]:
  """The last real queries of every row, and their positions.

  Args:
    cache: what it remembers goes before what the block holds.
    activations: the block.
    window: how many; all of the block's where it is shorter. Where the row is
      shorter, the rest may be anything, with position -1.
  """
  if cache.window is not None:
    return cache.window.queries, cache.window.positions
  length = activations.positions.shape[1]
  size = min(window, length)
  real = jnp.sum((activations.positions >= 0).astype(jnp.int32), axis=1)
  start = jnp.clip(real - size, 0, length - size)
  take = jax.lax.dynamic_slice_in_dim
  return (
    jax.vmap(lambda x, at: take(x, at, size, axis=1))(
      activations.queries, start
    ),
    jax.vmap(lambda x, at: take(x, at, size))(activations.positions, start),
  )


def window_mass(
  cache: LayerCache, activations: Activations, window: int
) -> Float[Array, "B K G T"]:
  """Attention that the last queries pay to every slot, summed over them.

  Float32; see `window_queries` and `kvjax.kernels.attention_mass.causal_mass`.
  """
  queries, places = window_queries(cache, activations, window)
  mass = causal_mass(
    queries,
    cache.keys,
    places,
    cache.positions,
    options=activations.attention,
    sinks=activations.sinks,
  )
  return by_kv_head(mass, cache.keys.shape[1])
