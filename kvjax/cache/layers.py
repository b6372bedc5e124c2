"""The KV cache of a layer: slots for keys and values."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.cache.observation import ObservationWindow
from kvjax.kernels.attention import attention
from kvjax.kernels.gather import compact
from kvjax.kernels.quantised import Quantised, quantise
from kvjax.struct import struct


def tree_bytes(tree: PyTree) -> int:
  """Bytes that the arrays of a tree (or their shapes) take, padding aside."""
  return sum(
    leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
  )


@runtime_checkable
class Layer(Protocol):
  """What the engine asks of a layer's cache while it is read and appended to.

  `Slots` are as many for every head, `kvjax.cache.packed.PackedLayer` has
  as many as
  each needs; `kvjax.cache.sparse.IndexedLayer` reads only some of them.
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
class Slots:
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
  """

  keys: Float[Array, "B K T D"] | Quantised
  values: Float[Array, "B K T D"] | Quantised
  positions: Int[Array, "B K T"]
  cursor: Int[Array, ""]

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

  def attend[S: "Slots"](
    self: S,
    queries: Float[Array, "B N S D"],
    query_positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B N S D"], S]:
    """Attention to all slots; see `kvjax.kernels.attention.attention`."""
    output = attention(
      queries, self.keys, self.values, query_positions, self.positions
    )
    return output, self

  def grown[S: "Slots"](self: S, extra: int) -> S:
    """The same tokens with `extra` more empty slots at the end."""
    wide = ((0, 0), (0, 0), (0, extra), (0, 0))
    keys, values = jax.tree.map(
      lambda x: jnp.pad(x, wide), (self.keys, self.values)
    )
    positions = jnp.pad(self.positions, wide[:3], constant_values=-1)
    return dataclasses.replace(
      self, keys=keys, values=values, positions=positions
    )

  def append[S: "Slots"](self: S, seen: Activations) -> S:
    """Writes a block at the cursor, in eight bits where the rest is.

    There must be room for it: without, the block would overwrite the newest
    tokens (a slice update is moved to fit), so that callers check first, as
    `kvjax.converse` does.
    """
    block = LayerCache.of(seen.with_kv_heads(self.keys.shape[1]))
    zero = jnp.zeros((), jnp.int32)
    start = (zero, zero, self.cursor)
    update = jax.lax.dynamic_update_slice

    def written(
      old: Float[Array, "B K T D"] | Quantised, new: Float[Array, "B K S D"]
    ) -> Float[Array, "B K T D"] | Quantised:
      own = (
        quantise(new, old.qvalue.dtype)
        if isinstance(old, Quantised)
        else new.astype(old.dtype)
      )
      return jax.tree.map(lambda x, y: update(x, y, (*start, zero)), old, own)

    # Else XLA writes once more in what reads the slots, out of a copy of all.
    keys, values, positions = jax.lax.optimization_barrier(
      (
        written(self.keys, block.keys),
        written(self.values, block.values),
        update(self.positions, block.positions, start),
      )
    )
    return dataclasses.replace(
      self,
      keys=keys,
      values=values,
      positions=positions,
      cursor=self.cursor + block.cursor,
    )


@struct
class LayerCache(Slots):
  """Slots as they were computed, among which a method may choose.

  Attributes:
    received: attention that each token has received so far, where a method
      remembers it between evictions.
    window: the last queries, likewise.
  """

  keys: Float[Array, "B K T D"]
  values: Float[Array, "B K T D"]
  received: Float[Array, "B K T"] | None = None
  window: ObservationWindow | None = None

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
    wide = ((0, 0), (0, 0), (0, extra))
    received = jax.tree.map(lambda x: jnp.pad(x, wide), self.received)
    grown = Slots.grown(dataclasses.replace(self, received=None), extra)
    return dataclasses.replace(grown, received=received)

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
    """See `Slots.append`; of new tokens no attention is known."""
    none = jnp.zeros((*self.positions.shape[:2], seen.positions.shape[1]))
    start = (0, 0, self.cursor)
    received = jax.tree.map(
      lambda x: jax.lax.dynamic_update_slice(x, none, start), self.received
    )
    return dataclasses.replace(super().append(seen), received=received)

  def take(self, slots: Int[Array, "B K M"]) -> "LayerCache":
    """The given slots, ascending, then -1, which makes an empty slot."""
    kept = compact(self.keys, self.values, self.positions, self.received, slots)
    counts = jnp.sum((kept.positions >= 0).astype(jnp.int32), axis=-1)
    return dataclasses.replace(self, cursor=jnp.max(counts), **kept._asdict())
