"""The KV cache of a layer: slots for keys and values."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kernels.attention import attention
from kernels.gather import compact
from kvjax.activations import Activations
from kvjax.observation import ObservationWindow
from kvjax.struct import struct


def tree_bytes(tree: PyTree) -> int:
  """Bytes that the arrays of a tree (or their shapes) take, padding aside."""
  return sum(
    leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
  )


@runtime_checkable
class Layer(Protocol):
  """What the engine asks of a layer's cache while it is read and appended to.

  `LayerCache` has as many slots for every head, `kvjax.packed.PackedLayer` as
  many as each needs; `kvjax.indexed.IndexedLayer` reads only some of them.
  """

  @property
  def capacity(self) -> int:
    """Slots that `append` can reach, filled or not."""
    ...

  @property
  def cursor(self) -> Int[Array, ""]:
    """The next of them to write."""
    ...

  @property
  def lengths(self) -> Int[Array, "B K"]:
    """Tokens held per row and KV head."""
    ...

  @property
  def reads(self) -> Int[Array, "B K"]:
    """Tokens that a token attends to, for a start."""
    ...

  def grown(self, extra: int) -> "Layer":
    """The same tokens with so many more slots to write."""
    ...

  def append(self, seen: Activations) -> "Layer":
    """Writes a block at the cursor; there must be room for it."""
    ...

  def attend(
    self,
    queries: Float[Array, "B N S D"],
    query_positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B N S D"], "Layer"]:
    """Attention, causal by positions; and the layer after it."""
    ...


@struct
class LayerCache:
  """Keys and values of one layer in T slots per row and KV head.

  A slot whose position is -1 is empty, whatever its key and value hold. Tokens
  stand in the order of their positions. New tokens of all rows and heads go to
  the slots from `cursor` on, so that a write is one slice update; rows and
  heads that hold less have empty slots before it.

  Attributes:
    keys: rotated keys.
    values: values.
    positions: each token's place in its uncompressed row; -1 for empty.
    cursor: the next slot to write.
    received: attention that each token has received so far, where a method
      remembers it between evictions.
    window: the last queries, likewise.
  """

  keys: Float[Array, "B K T D"]
  values: Float[Array, "B K T D"]
  positions: Int[Array, "B K T"]
  cursor: Int[Array, ""]
  received: Float[Array, "B K T"] | None = None
  window: ObservationWindow | None = None

  @property
  def capacity(self) -> int:
    """T, the number of slots."""
    return self.positions.shape[-1]

  @property
  def lengths(self) -> Int[Array, "B K"]:
    """Tokens held per row and KV head."""
    return jnp.sum(self.held.astype(jnp.int32), axis=-1)

  @property
  def reads(self) -> Int[Array, "B K"]:
    """All tokens held."""
    return self.lengths

  @property
  def held(self) -> Bool[Array, "B K T"]:
    """Slots that hold a token."""
    return self.positions >= 0

  @property
  def nbytes(self) -> int:
    """Bytes allocated."""
    return tree_bytes(self)

  def attend(
    self,
    queries: Float[Array, "B N S D"],
    query_positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B N S D"], "LayerCache"]:
    """Attention to all slots; see `kernels.attention.attention`."""
    output = attention(
      queries, self.keys, self.values, query_positions, self.positions
    )
    return output, self

  @classmethod
  def of(cls, seen: Activations) -> "LayerCache":
    """The block itself as a cache."""
    batch, kv_heads, length, _ = seen.keys.shape
    positions = jnp.broadcast_to(
      seen.positions[:, None], (batch, kv_heads, length)
    )
    cursor = jnp.asarray(length, jnp.int32)
    return cls(seen.keys, seen.values, positions, cursor)

  def with_kv_heads(self, count: int) -> "LayerCache":
    """Keys and values repeated for `count` heads, each for fewer queries."""
    times = count // self.keys.shape[1]
    if times == 1:
      return self
    return dataclasses.replace(
      self,
      keys=jnp.repeat(self.keys, times, axis=1),
      values=jnp.repeat(self.values, times, axis=1),
      positions=jnp.repeat(self.positions, times, axis=1),
    )

  def grown(self, extra: int) -> "LayerCache":
    """The same tokens with `extra` more empty slots at the end."""
    wide = ((0, 0), (0, 0), (0, extra), (0, 0))
    return dataclasses.replace(
      self,
      keys=jnp.pad(self.keys, wide),
      values=jnp.pad(self.values, wide),
      positions=jnp.pad(self.positions, wide[:3], constant_values=-1),
      received=jax.tree.map(lambda x: jnp.pad(x, wide[:3]), self.received),
    )

  def shrunk(self, capacity: int) -> "LayerCache":
    """The first slots alone; the others must be empty."""
    return dataclasses.replace(
      self,
      keys=self.keys[:, :, :capacity],
      values=self.values[:, :, :capacity],
      positions=self.positions[:, :, :capacity],
      cursor=jnp.minimum(self.cursor, capacity),
      received=jax.tree.map(lambda x: x[:, :, :capacity], self.received),
    )

  def forgetful(self) -> "LayerCache":
    """The same tokens without what a method remembers."""
    return dataclasses.replace(self, received=None, window=None)

  def append(self, seen: Activations) -> "LayerCache":
    """Writes a block at the cursor; there must be room for it.

    Without room the block would overwrite the newest tokens (a slice update is
    moved to fit), so that callers check first, as `kvjax.converse` does.
    """
    block = LayerCache.of(seen.with_kv_heads(self.keys.shape[1]))
    zero = jnp.zeros((), jnp.int32)
    start = (zero, zero, self.cursor)
    update = jax.lax.dynamic_update_slice
    keys = block.keys.astype(self.keys.dtype)
    values = block.values.astype(self.values.dtype)
    none = jnp.zeros(block.positions.shape, jnp.float32)
    return dataclasses.replace(
      self,
      keys=update(self.keys, keys, (*start, zero)),
      values=update(self.values, values, (*start, zero)),
      positions=update(self.positions, block.positions, start),
      cursor=self.cursor + block.cursor,
      received=jax.tree.map(lambda x: update(x, none, start), self.received),
    )

  def take(self, slots: Int[Array, "B K M"]) -> "LayerCache":
    """The given slots, ascending, then -1, which makes an empty slot."""
    kept = compact(self.keys, self.values, self.positions, self.received, slots)
    counts = jnp.sum((kept.positions >= 0).astype(jnp.int32), axis=-1)
    return dataclasses.replace(self, cursor=jnp.max(counts), **kept._asdict())
