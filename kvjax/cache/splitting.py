"""The split of a prompt into resident and retrievable tokens."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.layers import LayerCache
from kvjax.retrieval.base import Retrieval

# Rows of a bfloat16 tile of a TPU. Its kernels read stored slots in whole tiles
# and XLA gathers single ones; where the tiles are not whole, the two lay them
# out differently, and XLA copies the slots of all layers for each token.
_TILE = 16


class Split(NamedTuple):
  """A layer whose tokens are split into resident and retrievable ones.

  Attributes:
    cache: the layer.
    retrievable: slots of the tokens that may be retrieved.
    border: first slot after them, for each head.
    start: first retrievable slot of any row.
    end: one past the last slot that is stored: that of the last retrievable
      token of any row, or a few empty ones later, which fill up a tile.
  """

  cache: LayerCache
  retrievable: Bool[Array, "B K T"]
  border: Int[Array, "B K 1"]
  start: int
  end: int

  def stored(self) -> LayerCache:
    """Cuts out the tokens that may be retrieved."""
    cache, part = self.cache, slice(self.start, self.end)
    return dataclasses.replace(
      cache,
      keys=cache.keys[:, :, part],
      values=cache.values[:, :, part],
      positions=jnp.where(self.retrievable, cache.positions, -1)[:, :, part],
      cursor=jnp.asarray(self.end - self.start, jnp.int32),
    )

  def resident(self, retrieval: Retrieval) -> LayerCache:
    """Gathers the first and the last tokens, which every token attends to."""
    lengths = self.cache.lengths[..., None]
    first = jnp.arange(self.start, dtype=jnp.int32)[None, None]
    first = jnp.broadcast_to(first, (*lengths.shape[:2], self.start))
    local = jnp.arange(retrieval.local_range[1], dtype=jnp.int32)
    # Rows differ in their number of local tokens: list the most there can be,
    # and mask slots beyond the end of a row.
    last = jnp.maximum(self.border, self.start) + local[None, None]
    slots = jnp.concatenate([first, last], axis=-1)
    resident = self.cache.take(jnp.where(slots < lengths, slots, -1))
    if not retrieval.ring_size:
      return resident
    extra = self.start + retrieval.ring_size - resident.capacity
    # Places begin after the sinks even if every row is shorter than these.
    cursor = jnp.maximum(resident.cursor, self.start)
    return dataclasses.replace(resident.grow(extra), cursor=cursor)


def split_tokens(
  retrieval: Retrieval, cache: LayerCache, max_keys: int
) -> Split | None:
  """Splits the tokens of a layer into resident and retrievable ones.

  Args:
    retrieval: the method, which defines the resident tokens.
    cache: the layer.
    max_keys: maximum number of keys that any row retrieves.

  Returns:
    The split; None if every token will always read all keys.
  """
  slots = cache.capacity
  start = min(retrieval.sinks, slots)
  # Static, for all rows: a row that fills its slots and has the fewest local
  # tokens sets the end.
  end = max(slots - retrieval.local_range[0], 0)
  if retrieval.ring_size:  # all sinks and at least one slot to retrieve from
    start, end = retrieval.sinks, max(end, retrieval.sinks + 1)
  elif max_keys >= end - start:
    return None
  end += (start - end) % _TILE
  cache = cache.grow(max(end - slots, 0)).without_memory()
  lengths = cache.lengths
  number = jnp.arange(cache.capacity, dtype=jnp.int32)[None, None]
  border = jnp.maximum(lengths - retrieval.num_local(lengths), 0)[..., None]
  retrievable = (number >= start) & (number < border)
  return Split(cache, retrievable, border, start, end)
