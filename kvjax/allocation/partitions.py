"""Rows cut into partitions of equal length, some of them already thinned."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.cache.layers import LayerCache
from kvjax.selection import true_slots
from kvjax.struct import static, struct


@struct
class Partitions:
  """Where the partitions of every head lie that are still whole.

  They end a head's tokens: from the first of them on no position is missing,
  while of every partition before them one at least is gone.

  Attributes:
    index: number of each slot's token among those held.
    count: tokens held.
    start: number of the token that the first whole partition begins with.
    whole: whole partitions from there on; below 2 there is nothing to score.
    lag: L.
  """

  index: Int[Array, "B K T"]
  count: Int[Array, "B K"]
  start: Int[Array, "B K"]
  whole: Int[Array, "B K"]
  lag: int = static()

  @classmethod
  def of(cls, cache: LayerCache, sinks: int, lag: int) -> "Partitions":
    """Finds them by the positions alone, after any number of evictions."""
    valid = cache.valid
    index = jnp.cumsum(valid.astype(jnp.int32), axis=-1) - 1
    gone = jnp.where(valid, cache.positions - index, -1)
    all_gone = jnp.max(gone, axis=-1, keepdims=True)
    total = jnp.max(cache.positions, axis=-1) + 1
    last_run = valid & (gone == all_gone)
    run = jnp.where(last_run, cache.positions, total[..., None])
    first = jnp.maximum(jnp.min(run, axis=-1) - sinks, 0)
    begin = sinks + (first + lag - 1) // lag * lag
    count = jnp.sum(valid.astype(jnp.int32), axis=-1)
    return cls(
      index=index,
      count=count,
      start=count - (total - begin),
      whole=(total - begin) // lag,
      lag=lag,
    )

  def collect(
    self, x: Shaped[Array, "B K T"], cache: LayerCache, count: int
  ) -> Shaped[Array, "B K P L"]:
    """Values of the slots of the first `count` partitions' tokens."""
    slots = self.slots(cache, count)
    flat = slots.reshape(*slots.shape[:2], -1)
    return jnp.take_along_axis(x, flat, axis=-1).reshape(slots.shape)

  def slots(self, cache: LayerCache, count: int) -> Int[Array, "B K P L"]:
    """Slots of the tokens of the first `count` partitions, where there are."""
    order = true_slots(cache.valid, cache.capacity)
    index = self.start[..., None] + jnp.arange(count * self.lag)[None, None]
    index = jnp.minimum(index, cache.capacity - 1)
    slots = jnp.maximum(jnp.take_along_axis(order, index, axis=-1), 0)
    return slots.reshape(*self.count.shape, count, self.lag)

  @property
  def fixed(self) -> Bool[Array, "B K T"]:
    """Sinks, what earlier evictions kept, and the sliding window."""
    window = self.start + jnp.maximum(self.whole - 1, 0) * self.lag
    before = self.index < self.start[..., None]
    return before | (self.index >= window[..., None])

  def spread(self, x: Shaped[Array, "B K P L"]) -> Shaped[Array, "B K T"]:
    """Values of the partitions' tokens at their slots; elsewhere anything."""
    flat = x.reshape(*x.shape[:2], -1)
    if not flat.shape[-1]:
      return jnp.zeros(self.index.shape, x.dtype)
    place = jnp.clip(self.index - self.start[..., None], 0, flat.shape[-1] - 1)
    return jnp.take_along_axis(flat, place, axis=-1)
