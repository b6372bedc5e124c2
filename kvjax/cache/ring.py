"""A ring of resident tokens: a new token replaces the oldest one.

Every row and KV head numbers the tokens that arrive in its ring, and token i is
in place i modulo W. Neither padding nor other rows affect when a token moves.
Replaced tokens move to spare slots at the end of another cache. A step writes
the same spare slots for all rows, and rows that move fewer tokens leave some of
them empty.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.layers import LayerCache
from kvjax.kernels.stacks import after
from kvjax.placement import gather_rows
from kvjax.retrieval.base import PendingKeys
from kvjax.struct import replace, static, struct


class Moved(NamedTuple):
  """Tokens that leave a ring.

  Attributes:
    keys: keys of the tokens.
    values: values of the tokens.
    start: stored slot of the first token.
  """

  keys: Float[Array, "B K M D"]
  values: Float[Array, "B K M Dv"]
  start: Int[Array, ""]


@struct
class Ring:
  """Resident tokens, and the cache that the oldest of them move to.

  Attributes:
    resident: the sinks, which stay, then the W places of the ring. `cursor`
      keeps counting beyond them.
    stored: the cache that tokens move to, without keys and values; `cursor` is
      the next slot to write.
    width: W.
    spare: E, number of slots at the end of `stored` for moved tokens.
  """

  resident: LayerCache
  stored: LayerCache
  width: int = static()
  spare: int = static()

  @property
  def sinks(self) -> int:
    """Number of slots before the ring."""
    return self.resident.capacity - self.width

  @property
  def spare_valid(self) -> Bool[Array, "B K E"]:
    """Mask of the spare slots that contain a token."""
    return self.stored.valid[..., self.stored.capacity - self.spare :]

  @property
  def num_arrived(self) -> Int[Array, "B K"]:
    """Number of tokens that have arrived in the ring so far."""
    # Every arrived token is in the ring or, once replaced, in a spare slot.
    ring_valid = self.resident.valid[..., self.sinks :]
    valid = jnp.concatenate([ring_valid, self.spare_valid], axis=-1)
    return jnp.sum(valid, axis=-1, dtype=jnp.int32)

  @property
  def ring_tokens(self) -> Int[Array, "B K W"]:
    """Number of the token in each place of the ring; -1 for none."""
    last = self.num_arrived[..., None] - 1
    place = jnp.arange(self.width, dtype=jnp.int32)[None, None]
    # The last number that is congruent to the place modulo W.
    number = last - (last - place) % self.width
    return jnp.where(self.resident.valid[..., self.sinks :], number, -1)

  @property
  def moved_tokens(self) -> Int[Array, "B K E"]:
    """Number of the token in each spare slot; arbitrary for empty slots."""
    # Tokens leave in the order of their arrival, so the i-th filled spare slot
    # holds token i.
    return jnp.maximum(
      jnp.cumsum(self.spare_valid, axis=-1, dtype=jnp.int32) - 1, 0
    )

  def pending(self, positions: Int[Array, " B"], first: int) -> PendingKeys:
    """Returns the tokens of the ring, which will be stored later.

    Args:
      positions: of the token that retrieves; it sees no later token.
      first: slot in which token 0 of the ring will be stored.
    """
    ring_positions = self.resident.positions[..., self.sinks :]
    visible = (ring_positions >= 0) & (
      ring_positions <= positions[:, None, None]
    )
    keys = self.resident.keys[:, :, self.sinks :].astype(jnp.float32)
    return PendingKeys(
      jnp.where(visible[..., None], keys, 0.0),
      jnp.where(visible, first + self.ring_tokens, -1),
    )

  def append(self, block: LayerCache) -> tuple["Ring", "Moved"]:
    """Appends a block of at most W slots, whose padding is at its end.

    There must be room: the block's slots count first towards the free places of
    the ring and then towards the spare slots.

    Returns:
      The ring without the keys and values of the tokens that left, and these.
    """
    num_arrived = self.num_arrived[..., None]
    real = jnp.sum(block.valid, axis=-1, keepdims=True, dtype=jnp.int32)
    stored, moved = self._evict(block.capacity, num_arrived, real)
    # The new tokens overwrite those that move. Unless the write depends on
    # the reads of these, XLA copies the ring.
    real = after(real, moved.keys, moved.values)
    resident = self._write(block, num_arrived, real)
    return replace(self, resident=resident, stored=stored), moved

  def _write(
    self,
    block: LayerCache,
    num_arrived: Int[Array, "B K 1"],
    real: Int[Array, "B K 1"],
  ) -> LayerCache:
    """Writes new tokens over the oldest residents."""
    old = self.resident
    place = jnp.arange(old.capacity, dtype=jnp.int32)[None, None] - self.sinks
    # Which token of the block falls on each place: token `num_arrived` + i of a
    # head goes to that number modulo W.
    order = (place - num_arrived) % self.width
    new = (place >= 0) & (order < real)
    order = jnp.where(new, order, -1)

    def overwrite(
      old: Shaped[Array, "B K R D"], rows: Shaped[Array, "B K S D"]
    ) -> Shaped[Array, "B K R D"]:
      if block.capacity > 1:  # a single token broadcasts to all places
        rows = gather_rows(rows, order)
      return jnp.where(new[..., None], rows.astype(old.dtype), old)

    positions = overwrite(old.positions[..., None], block.positions[..., None])
    return dataclasses.replace(
      old,
      keys=overwrite(old.keys, block.keys),
      values=overwrite(old.values, block.values),
      positions=positions[..., 0],
      cursor=old.cursor + block.capacity,
    )

  def _evict(
    self, size: int, num_arrived: Int[Array, "B K 1"], real: Int[Array, "B K 1"]
  ) -> tuple[LayerCache, "Moved"]:
    """Moves the tokens that `size` new ones replace to the stored ones."""
    # The cursor counts padding, too, so no head is beyond it: the first `free`
    # tokens of a block replace none. Only the rest needs spare slots.
    free = jnp.maximum(self.resident.capacity - self.resident.cursor, 0)
    step = jnp.arange(min(size, self.spare), dtype=jnp.int32)[None, None] + free
    evicted = (step < real) & (num_arrived + step >= self.width)
    slots = jnp.where(
      evicted, self.sinks + (num_arrived + step) % self.width, -1
    )
    old = self.resident
    keys, values = gather_rows((old.keys, old.values), slots)
    positions = gather_rows(old.positions[..., None], slots)[..., 0]
    positions = jnp.where(evicted, positions, -1)
    first = self.stored.capacity - self.spare - old.capacity
    # The cursor counts on beyond the ring, by the spare slots used so far.
    # While places are free, none is used, so the update always fits: JAX would
    # move one that does not.
    start = first + jnp.maximum(old.cursor, old.capacity)
    stored = replace(
      self.stored,
      positions=jax.lax.dynamic_update_slice_in_dim(
        self.stored.positions, positions, start, axis=2
      ),
      cursor=first + jnp.maximum(old.cursor + size, old.capacity),
    )
    return stored, Moved(keys, values, start)
