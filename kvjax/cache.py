"""The KV cache: a plain pytree of per-layer slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.struct import struct


def tree_bytes(tree: PyTree) -> int:
  """Bytes that the arrays of a tree (or their shapes) take, padding aside."""
  return sum(
    leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
  )


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
  """

  keys: Float[Array, "B K T D"]
  values: Float[Array, "B K T D"]
  positions: Int[Array, "B K T"]
  cursor: Int[Array, ""]

  @property
  def capacity(self) -> int:
    """T, the number of slots."""
    return self.positions.shape[-1]

  @property
  def lengths(self) -> Int[Array, "B K"]:
    """Tokens held per row and KV head."""
    return jnp.sum((self.positions >= 0).astype(jnp.int32), axis=-1)

  @property
  def nbytes(self) -> int:
    """Bytes allocated."""
    return tree_bytes(self)

  @classmethod
  def of(cls, seen: Activations) -> "LayerCache":
    """The block itself as a cache."""
    batch, kv_heads, length, _ = seen.keys.shape
    positions = jnp.broadcast_to(
      seen.positions[:, None], (batch, kv_heads, length)
    )
    cursor = jnp.asarray(length, jnp.int32)
    return cls(seen.keys, seen.values, positions, cursor)

  def grown(self, extra: int) -> "LayerCache":
    """The same tokens with `extra` more empty slots at the end."""
    wide = ((0, 0), (0, 0), (0, extra), (0, 0))
    return LayerCache(
      jnp.pad(self.keys, wide),
      jnp.pad(self.values, wide),
      jnp.pad(self.positions, wide[:3], constant_values=-1),
      self.cursor,
    )

  def append(self, seen: Activations) -> "LayerCache":
    """Writes a block at the cursor; there must be room for it.

    Without room the block would overwrite the newest tokens (a slice update is
    moved to fit), so that callers check first, as `kvjax.converse` does.
    """
    block = LayerCache.of(seen)
    zero = jnp.zeros((), jnp.int32)
    start = (zero, zero, self.cursor)
    update = jax.lax.dynamic_update_slice
    return LayerCache(
      update(self.keys, block.keys.astype(self.keys.dtype), (*start, zero)),
      update(
        self.values, block.values.astype(self.values.dtype), (*start, zero)
      ),
      update(self.positions, block.positions, start),
      self.cursor + block.cursor,
    )

  def take(self, slots: Int[Array, "B K M"]) -> "LayerCache":
    """The given slots, in that order; a slot of -1 stays empty."""
    kept = slots >= 0
    index = jnp.maximum(slots, 0)
    positions = jnp.take_along_axis(self.positions, index, axis=-1)
    positions = jnp.where(kept, positions, -1)
    counts = jnp.sum((positions >= 0).astype(jnp.int32), axis=-1)
    return LayerCache(
      jnp.take_along_axis(self.keys, index[..., None], axis=-2),
      jnp.take_along_axis(self.values, index[..., None], axis=-2),
      positions,
      jnp.max(counts),
    )


@struct
class Cache:
  """The cache of a whole model.

  Attributes:
    layers: one cache per layer; their capacities may differ.
    next_positions: the position of each row's next token, which is the number
      of tokens the row has seen, kept or not.
  """

  layers: tuple[LayerCache, ...]
  next_positions: Int[Array, " B"]

  @property
  def nbytes(self) -> int:
    """Bytes allocated."""
    return tree_bytes(self)

  @property
  def lengths(self) -> Int[Array, "L B K"]:
    """Tokens held per layer, row and KV head."""
    return jnp.stack([layer.lengths for layer in self.layers])


def concatenate(caches: list[Cache]) -> Cache:
  """Joins caches of equal capacities along the batch."""

  def join(*leaves: Array) -> Array:
    if leaves[0].ndim == 0:  # cursors: every row starts after the fullest
      return jnp.max(jnp.stack(leaves))
    return jnp.concatenate(leaves, axis=0)

  return jax.tree.map(join, *caches)
