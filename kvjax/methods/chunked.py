"""Chunk-wise selection: every chunk of the prompt is compressed by itself."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, Shaped

from kvjax.activations import Activations
from kvjax.allocation.per_chunk import PerChunk
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.kernels.chunks import by_chunk
from kvjax.kernels.select import mask_to_slots, slots_to_mask
from kvjax.labels import name_of
from kvjax.methods.around import Using, refuse_joined
from kvjax.methods.base import LayerBudget
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least


@dataclasses.dataclass(frozen=True)
class Chunked(Using):
  """Compresses each chunk of a prompt by another method, independently.

  To the method, a chunk is a prompt of its own: its statistics, its last
  queries and its first tokens are those of the chunk. All chunks keep the same
  share, so that no part of the prompt is lost.

  Source: kvpress's ChunkPress, after Corallo and Papotti, arXiv 2408.00167
  (FINCH). kvpress rotates the queries of a chunk to the last positions of the
  prompt; here they stay at their own, which matters to methods that score by
  attention.

  Attributes:
    over: the method that selects.
    length: tokens per chunk; the last one may be shorter.
  """

  length: int = 1024

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, length=1)
    refuse_joined("chunked/", self.over)
    allocation = self.over.allocation
    if allocation.ragged:
      raise InputError(
        "Every head keeps the same share of each chunk; those of "
        f"{name_of(self.over)} share a budget."
      )
    if allocation.prescribes:
      raise InputError(
        f"{name_of(self.over)} keeps its own share of the parts of a "
        "prompt, not what a chunk may keep; use it without chunked/."
      )
    if "rerotate" in self.over.traits.activations:
      raise InputError(
        f"{name_of(self.over)} moves queries by their positions in the "
        "prompt, and those of a chunk are numbered from 0; use it without "
        "chunked/."
      )

  @property
  def traits(self) -> Traits:
    """Those of the method, for whole prompts."""
    traits = self.over.traits.once("its chunks are those of a whole prompt")
    even = "every chunk has its own share"
    # The last queries of a chunk are anywhere in the prompt.
    queries = 0 if traits.queries == 0 else None
    return dataclasses.replace(traits, even=even, queries=queries)

  @property
  def allocation(self) -> PerChunk:
    """A share of each chunk."""
    return PerChunk(self.length)

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> PyTree[Array]:
    """Evaluates all chunks by the method, as rows of a batch."""
    return self.over.evaluate(
      layer, self._cache(cache), self._activations(activations)
    )

  def select(
    self, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects in each chunk what the method selects of it."""
    assert budget.parts is not None
    batch, kv_heads, capacity = cache.positions.shape
    # Slots of a chunk: no more than there are.
    width = min(self.length, capacity)
    protected, share = budget.protected, budget.share
    if protected is not None:
      protected = self._split(protected[:, None, :capacity])[:, 0]
    if share is not None:
      share = jnp.repeat(share, budget.parts.shape[1])
    # `_split` lays out (row, chunk) in the same row-major order.
    counts = budget.parts.reshape(-1)
    of_chunk = LayerBudget(counts, width, protected=protected, share=share)
    chunks = self._cache(cache)
    slots = self.over.select(scores, chunks, of_chunk)
    # Slots of a chunk back to slots of the row.
    kept = slots_to_mask(slots, width) & chunks.valid
    kept = kept.reshape(batch, -1, kv_heads, width)
    kept = jnp.moveaxis(kept, 1, 2).reshape(batch, kv_heads, -1)
    return mask_to_slots(kept[..., :capacity], budget.capacity)

  def _cache(self, cache: LayerCache) -> LayerCache:
    """The cache with a row for each chunk."""
    # In a whole prompt slot i holds token i, so cutting slots cuts the text.
    return LayerCache(
      self._split(cache.keys),
      self._split(cache.values),
      self._positions(cache.positions),
      jnp.asarray(self.length, jnp.int32),
    )

  def _activations(self, activations: Activations) -> Activations:
    """The activations with a row for each chunk."""
    inputs = activations.inputs
    parts: dict[str, Any] = {
      name: self._split(part)
      for name, part in (
        ("keys_unrotated", activations.keys_unrotated),
        ("queries_unrotated", activations.queries_unrotated),
        ("replayed", activations.replayed),
      )
      if part is not None
    }
    if inputs is not None:
      parts["inputs"] = self._split(inputs[:, None])[:, 0]
    queries, keys = activations.queries, self._split(activations.keys)
    _, heads, count, dim = queries.shape
    # All of them, or some that the method does not read.
    if count == activations.positions.shape[1]:
      queries = self._split(queries)
    else:
      queries = jnp.zeros((len(keys), heads, 0, dim), queries.dtype)
    return dataclasses.replace(
      activations,
      queries=queries,
      keys=keys,
      values=self._split(activations.values),
      positions=self._positions(activations.positions[:, None])[:, 0],
      **parts,
    )

  def _positions(self, x: Int[Array, "B H T"]) -> Int[Array, "R H c"]:
    """Positions in each chunk, -1 for empty slots."""
    # `_split` pads with zeros; the shift turns them into -1, empty slots.
    shifted = self._split(x + 1) - 1
    return jnp.where(shifted >= 0, shifted % self.length, -1)

  def _split(self, x: Shaped[Array, "B H T *D"]) -> Shaped[Array, "R H c *D"]:
    """Cuts the slots of all rows into R = B C chunks, filled with zeros."""
    chunks = jnp.moveaxis(by_chunk(x, self.length), 2, 1)
    return chunks.reshape(-1, *chunks.shape[2:])
