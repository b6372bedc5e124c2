"""Which tokens of a prompt every token attends to, and which are looked up."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.layers import LayerCache
from kvjax.retrieval.base import Retrieval


class Split(NamedTuple):
  """A layer whose tokens are told apart.

  Attributes:
    cache: the layer.
    lookup: slots of the tokens that may be looked up.
    border: the first slot after them, of each head.
    start: the first slot that any row stores.
    end: behind the last.
  """

  cache: LayerCache
  lookup: Bool[Array, "B K T"]
  border: Int[Array, "B K 1"]
  start: int
  end: int

  def stored(self) -> LayerCache:
    """The tokens that may be looked up."""
    cache, part = self.cache, slice(self.start, self.end)
    return dataclasses.replace(
      cache,
      keys=cache.keys[:, :, part],
      values=cache.values[:, :, part],
      positions=jnp.where(self.lookup, cache.positions, -1)[:, :, part],
      cursor=jnp.asarray(self.end - self.start, jnp.int32),
    )

  def resident(self, retrieval: Retrieval) -> LayerCache:
    """The first and the last tokens, which every token attends to."""
    lengths = self.cache.lengths[..., None]
    first = jnp.arange(self.start, dtype=jnp.int32)[None, None]
    first = jnp.broadcast_to(first, (*lengths.shape[:2], self.start))
    latest = jnp.arange(retrieval.latest_range[1], dtype=jnp.int32)
    last = jnp.maximum(self.border, self.start) + latest[None, None]
    slots = jnp.concatenate([first, last], axis=-1)
    resident = self.cache.take(jnp.where(slots < lengths, slots, -1))
    if not retrieval.ring:
      return resident
    extra = self.start + retrieval.ring - resident.capacity
    cursor = jnp.maximum(resident.cursor, self.start)
    return dataclasses.replace(resident.grown(extra), cursor=cursor)


def split_tokens(
  retrieval: Retrieval, cache: LayerCache, most: int
) -> Split | None:
  """Tells the tokens of a layer apart.

  Args:
    retrieval: says which are resident.
    cache: the layer.
    most: keys that any row looks up.

  Returns:
    None where so many keys are read that nothing is left out, now or later.
  """
  slots = cache.capacity
  start = min(retrieval.sinks, slots)
  end = max(slots - retrieval.latest_range[0], 0)
  if retrieval.ring:  # all sinks, and a slot to look up in
    start, end = retrieval.sinks, max(end, retrieval.sinks + 1)
    cache = cache.grown(max(end - slots, 0))
  elif most >= end - start:
    return None
  cache = cache.forgetful()
  lengths = cache.lengths
  number = jnp.arange(cache.capacity, dtype=jnp.int32)[None, None]
  border = jnp.maximum(lengths - retrieval.latest(lengths), 0)[..., None]
  lookup = (number >= start) & (number < border)
  return Split(cache, lookup, border, start, end)
