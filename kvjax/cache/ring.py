"""Resident tokens in a ring: where a new one has no room, the oldest moves on.

Every row and KV head numbers the tokens that come to its ring, so that neither
padding nor other rows make them move sooner; token i sits in place i modulo W.
Tokens move to the spare slots at the end of another cache. There a step writes
the same slots for all rows, and those that move fewer tokens leave some empty.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.layers import LayerCache
from kvjax.placement import gather_rows
from kvjax.struct import static, struct, updated


class Moved(NamedTuple):
  """Tokens that leave a ring.

  Attributes:
    keys: of the tokens.
    values: likewise.
    start: the stored slot of the first.
  """

  keys: Float[Array, "B K M D"]
  values: Float[Array, "B K M Dv"]
  start: Int[Array, ""]


@struct
class Ring:
  """Resident tokens and where the oldest of them go.

  Attributes:
    resident: the sinks, which stay, then the W places of the ring. `cursor`
      goes on counting behind them.
    stored: where tokens move to, without keys and values; `cursor` is the
      next slot to write.
    width: W.
    spare: E, how many slots at its end are for them.
  """

  resident: LayerCache
  stored: LayerCache
  width: int = static()
  spare: int = static()

  @property
  def sinks(self) -> int:
    """Slots before the ring."""
    return self.resident.capacity - self.width

  @property
  def moved(self) -> Bool[Array, "B K E"]:
    """The spare slots that hold a token."""
    return self.stored.valid[..., self.stored.capacity - self.spare :]

  @property
  def came(self) -> Int[Array, "B K"]:
    """How many tokens have come to the ring so far."""
    here = self.resident.valid[..., self.sinks :]
    valid = jnp.concatenate([here, self.moved], axis=-1)
    return jnp.sum(valid.astype(jnp.int32), axis=-1)

  @property
  def waiting(self) -> Int[Array, "B K W"]:
    """Which token each place of the ring holds; -1 for none."""
    last = self.came[..., None] - 1
    place = jnp.arange(self.width, dtype=jnp.int32)[None, None]
    number = last - (last - place) % self.width
    return jnp.where(self.resident.valid[..., self.sinks :], number, -1)

  @property
  def gone(self) -> Int[Array, "B K E"]:
    """Which token each spare slot holds; what holds none may say anything."""
    return jnp.maximum(jnp.cumsum(self.moved.astype(jnp.int32), axis=-1) - 1, 0)

  def after(self, block: LayerCache) -> tuple["Ring", "Moved"]:
    """Writes a block of W slots at most, whose padding is at its end.

    There must be room: the block's slots go, as far as `cursor` counts, to what
    is left of the ring and then to spare slots.
    """
    came = self.came[..., None]
    real = jnp.sum(block.valid.astype(jnp.int32), axis=-1, keepdims=True)
    stored, moved = self._pushed_out(block.capacity, came, real)
    resident = self._written(block, came, real)
    return updated(self, resident=resident, stored=stored), moved

  def _written(
    self,
    block: LayerCache,
    came: Int[Array, "B K 1"],
    real: Int[Array, "B K 1"],
  ) -> LayerCache:
    """The residents, new tokens in the places of the oldest."""
    old = self.resident
    place = jnp.arange(old.capacity, dtype=jnp.int32)[None, None] - self.sinks
    order = (place - came) % self.width
    new = (place >= 0) & (order < real)
    order = jnp.where(new, order, -1)

    def over(
      old: Shaped[Array, "B K R D"], rows: Shaped[Array, "B K S D"]
    ) -> Shaped[Array, "B K R D"]:
      if block.capacity > 1:  # else one for all places
        rows = gather_rows(rows, order)
      return jnp.where(new[..., None], rows.astype(old.dtype), old)

    positions = over(old.positions[..., None], block.positions[..., None])
    return dataclasses.replace(
      old,
      keys=over(old.keys, block.keys),
      values=over(old.values, block.values),
      positions=positions[..., 0],
      cursor=old.cursor + block.capacity,
    )

  def _pushed_out(
    self, size: int, came: Int[Array, "B K 1"], real: Int[Array, "B K 1"]
  ) -> tuple[LayerCache, "Moved"]:
    """The stored positions, and what so many new tokens push out."""
    free = jnp.maximum(self.resident.capacity - self.resident.cursor, 0)
    step = jnp.arange(min(size, self.spare), dtype=jnp.int32)[None, None] + free
    leaves = (step < real) & (came + step >= self.width)
    slots = jnp.where(leaves, self.sinks + (came + step) % self.width, -1)
    old = self.resident
    keys, values = gather_rows((old.keys, old.values), slots)
    positions = gather_rows(old.positions[..., None], slots)[..., 0]
    positions = jnp.where(leaves, positions, -1)
    first = self.stored.capacity - self.spare - old.capacity
    start = first + jnp.maximum(old.cursor, old.capacity)
    stored = updated(
      self.stored,
      positions=jax.lax.dynamic_update_slice_in_dim(
        self.stored.positions, positions, start, axis=2
      ),
      cursor=first + jnp.maximum(old.cursor + size, old.capacity),
    )
    return stored, Moved(keys, values, start)
