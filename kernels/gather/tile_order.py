"""The order in which a gather visits tiles, and the addresses of its rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Rows copied per loop iteration: one per bit of a word.
TURN = 32
# Words are processed in groups of eight, the sublanes of a register.
LINES = 8
# The low bits of a code are the shift within a word, the high bits the index of
# the word in its tile.
SHIFT_BITS = 5


class Plan(NamedTuple):
  """The steps that read and write tiles, both in ascending order.

  Attributes:
    source: the tile that a step reads.
    target: the tile that a step writes.
    first: the first row that a step writes, followed by the number of rows. A
      step writes the rows up to the first of the next step.
  """

  source: Int[Array, "B K E"]
  target: Int[Array, "B K E"]
  first: Int[Array, "B K E1"]

  @classmethod
  def of(
    cls, slots: Int[Array, "B K M"], tiles: int, read: int, write: int
  ) -> "Plan":
    """Plans the steps of a gather.

    No step reads a tile without need, unless a list starts with -1.

    Args:
      slots: the slots to copy, ascending; -1 may occur anywhere. M is a
        multiple of `write`.
      tiles: the number of tiles to read from.
      read: slots per tile that is read.
      write: rows per tile that is written.
    """
    batch, kv_heads, size = slots.shape
    rows = jnp.arange(size, dtype=jnp.int32)[None, None, None]
    edges = jnp.arange(1, tiles, dtype=jnp.int32)[None, None, :, None] * read
    # Slots ascend, and -1 is below every edge: the minimum is the first row
    # that is read from the tile at the edge or from a later one.
    after = jnp.where(slots[:, :, None] >= edges, rows, size)
    source_starts = jnp.min(after, axis=-1)
    target_starts = jnp.arange(0, size, write, dtype=jnp.int32)[None, None]
    target_starts = jnp.broadcast_to(
      target_starts, (batch, kv_heads, size // write)
    )
    # A step begins wherever the source or the target tile changes. Steps that
    # begin at `size` copy nothing.
    first = jnp.sort(
      jnp.concatenate([source_starts, target_starts], axis=-1), axis=-1
    )
    # Tiles without rows start together with the next one, so that none is read.
    has_started = source_starts[:, :, None] <= first[..., None]
    has_started &= (source_starts < size)[:, :, None]
    return cls(
      source=jnp.sum(has_started, axis=-1, dtype=jnp.int32),
      # Empty steps stay at the last tile, which is then not moved again.
      target=jnp.minimum(first, size - 1) // write,
      first=jnp.pad(first, ((0, 0), (0, 0), (0, 1)), constant_values=size),
    )


def codes(
  slots: Int[Array, "B K M"], read: int, packing: int
) -> Int[Array, "B K M"]:
  """Encodes word and shift of each slot in its tile; 0 for no slot.

  Args:
    slots: the slots.
    read: slots per tile.
    packing: slots that share a word, 1, 2 or 4.
  """
  inside = slots % read
  size = LINES * packing
  # Rows 0 to 7 of a group are the lowest parts of its eight words, as
  # `words.pack_words` packs them.
  shift = inside % size // LINES * (32 // packing)
  word = inside // size * LINES + inside % LINES
  code = (word << SHIFT_BITS) | shift
  return jnp.where(slots >= 0, code, 0)


def listed_bits(slots: Int[Array, "B K M"]) -> Int[Array, "B K m"]:
  """Packs, for every `TURN` slots, one bit each: whether it is listed."""
  turns = slots.reshape(*slots.shape[:2], -1, TURN)
  bits = jnp.uint32(1) << jnp.arange(TURN, dtype=jnp.uint32)
  bits = jnp.where(turns >= 0, bits[None, None, None], jnp.uint32(0))
  return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=-1), jnp.int32)
