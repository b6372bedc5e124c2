"""How the tiles of a copy follow one another, and where its rows lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Rows that are copied in one turn of a loop: as many as a word has bits.
TURN = 32
# Words are handled by eight, one below the other.
LINES = 8
# The lower bits of a code say by how much a word is shifted, the others which
# word of its tile it is.
SHIFT_BITS = 5


class Plan(NamedTuple):
  """The steps in which tiles are read and written; both only go forward.

  Attributes:
    source: tile that a step reads.
    target: tile that it writes.
    first: the first row of the result that it writes, and at last their
      number; it writes all rows up to that of the next step.
  """

  source: Int[Array, "B K E"]
  target: Int[Array, "B K E"]
  first: Int[Array, "B K E1"]

  @classmethod
  def of(
    cls, slots: Int[Array, "B K M"], tiles: int, read: int, write: int
  ) -> "Plan":
    """The steps; only a result that begins with no slot reads a tile in vain.

    Args:
      slots: what to copy, ascending; -1 anywhere. M is a multiple of `write`.
      tiles: how many can be read.
      read: slots of a tile that is read.
      write: rows of a tile that is written.
    """
    batch, kv_heads, most = slots.shape
    rows = jnp.arange(most, dtype=jnp.int32)[None, None, None]
    edges = jnp.arange(1, tiles, dtype=jnp.int32)[None, None, :, None] * read
    after = jnp.where(slots[:, :, None] >= edges, rows, most)
    entered = jnp.min(after, axis=-1)
    begun = jnp.arange(0, most, write, dtype=jnp.int32)[None, None]
    begun = jnp.broadcast_to(begun, (batch, kv_heads, most // write))
    first = jnp.sort(jnp.concatenate([entered, begun], axis=-1), axis=-1)
    behind = entered[:, :, None] <= first[..., None]
    behind &= (entered < most)[:, :, None]
    return cls(
      source=jnp.sum(behind.astype(jnp.int32), axis=-1),
      target=jnp.minimum(first, most - 1) // write,
      first=jnp.pad(first, ((0, 0), (0, 0), (0, 1)), constant_values=most),
    )


def codes(
  slots: Int[Array, "B K M"], read: int, packing: int
) -> Int[Array, "B K M"]:
  """Where each slot lies in its tile: word and shift; 0 for no slot.

  Args:
    slots: the slots.
    read: slots of a tile.
    packing: slots that share a word, 1, 2 or 4.
  """
  inside = slots % read
  size = LINES * packing
  shift = inside % size // LINES * (32 // packing)
  word = inside // size * LINES + inside % LINES
  code = (word << SHIFT_BITS) | shift
  return jnp.where(slots >= 0, code, 0)


def named(slots: Int[Array, "B K M"]) -> Int[Array, "B K m"]:
  """For every `TURN` slots a bit for each: whether it is named."""
  turns = slots.reshape(*slots.shape[:2], -1, TURN)
  bits = jnp.uint32(1) << jnp.arange(TURN, dtype=jnp.uint32)
  bits = jnp.where(turns >= 0, bits[None, None, None], jnp.uint32(0))
  return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=-1), jnp.int32)
