"""Rows split into partitions, some of which have been evicted from."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.cache.layers import LayerCache
from kvjax.kernels.select import mask_to_slots
from kvjax.struct import static, struct


@struct
class Partitions:
  """The complete partitions of every head.

  They are the last tokens of a head: no position is missing after the start of
  the first of them, and at least one is missing in every partition before.

  Attributes:
    index: index of each slot's token among the tokens of the head.
    count: number of tokens.
    start: index of the first token of the first complete partition.
    num_complete: number of complete partitions; below 2, none is scored.
    lag: L.
  """

  index: Int[Array, "B K T"]
  count: Int[Array, "B K"]
  start: Int[Array, "B K"]
  num_complete: Int[Array, "B K"]
  lag: int = static()

  @classmethod
  def of(cls, cache: LayerCache, sinks: int, lag: int) -> "Partitions":
    """Finds the partitions by positions, after any number of evictions."""
    valid = cache.valid
    index = jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1
    # Number of tokens evicted before each kept one. No token is missing after
    # the first one with the highest number.
    num_evicted = jnp.where(valid, cache.positions - index, -1)
    max_evicted = jnp.max(num_evicted, axis=-1, keepdims=True)
    total = jnp.max(cache.positions, axis=-1) + 1
    last_run = valid & (num_evicted == max_evicted)
    # Partitions begin at S + k L in the text; the first such place in that run
    # begins the first complete one.
    run = jnp.where(last_run, cache.positions, total[..., None])
    first = jnp.maximum(jnp.min(run, axis=-1) - sinks, 0)
    begin = sinks + (first + lag - 1) // lag * lag
    count = jnp.sum(valid, axis=-1, dtype=jnp.int32)
    return cls(
      index=index,
      count=count,
      # Nothing is missing after `begin`: count from the end.
      start=count - (total - begin),
      num_complete=(total - begin) // lag,
      lag=lag,
    )

  def collect(
    self, x: Shaped[Array, "B K T"], cache: LayerCache, count: int
  ) -> Shaped[Array, "B K P L"]:
    """Gathers the values of slots in the first `count` partitions."""
    slots = self.slots(cache, count)
    flat = slots.reshape(*slots.shape[:2], -1)
    return jnp.take_along_axis(x, flat, axis=-1).reshape(slots.shape)

  def slots(self, cache: LayerCache, count: int) -> Int[Array, "B K P L"]:
    """Slots of the first `count` partitions; arbitrary beyond the last."""
    order = mask_to_slots(cache.valid, cache.capacity)
    index = (
      self.start[..., None]
      + jnp.arange(count * self.lag, dtype=jnp.int32)[None, None]
    )
    # Slots beyond the last partition are arbitrary, but must be in range.
    index = jnp.minimum(index, cache.capacity - 1)
    slots = jnp.maximum(jnp.take_along_axis(order, index, axis=-1), 0)
    return slots.reshape(*self.count.shape, count, self.lag)

  @property
  def fixed(self) -> Bool[Array, "B K T"]:
    """Mask of the sinks, earlier kept tokens, and the sliding window."""
    window = self.start + jnp.maximum(self.num_complete - 1, 0) * self.lag
    before = self.index < self.start[..., None]
    return before | (self.index >= window[..., None])

  def spread(self, x: Shaped[Array, "B K P L"]) -> Shaped[Array, "B K T"]:
    """Scatters values of partitions to their slots; arbitrary elsewhere."""
    flat = x.reshape(*x.shape[:2], -1)
    if not flat.shape[-1]:
      return jnp.zeros(self.index.shape, x.dtype)
    place = jnp.clip(self.index - self.start[..., None], 0, flat.shape[-1] - 1)
    return jnp.take_along_axis(flat, place, axis=-1)
