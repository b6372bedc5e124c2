"""ChunkKV as kvpress reads it: any scorer, and no window of its own."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.allocation.whole_chunks import WholeChunkCounts
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.kernels.chunks import by_chunk
from kvjax.kernels.select import among_largest, mask_to_slots
from kvjax.labels import name_of
from kvjax.methods.around import Using
from kvjax.methods.base import LayerBudget
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least


@runtime_checkable
class RanksGroups(Protocol):
  """A method whose selection follows from one score per token."""

  def group_scores(
    self, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
  ) -> Float[Array, "B K T"]:
    """Scores of all tokens; protected tokens have the highest.

    Args:
      scores: result of `evaluate`.
      cache: the candidates.
      budget: how many slots to keep.
    """
    ...


@dataclasses.dataclass(frozen=True)
class WholeChunks(Using):
  """Keeps the chunks with the highest mean score of another method.

  Scores are summed over the heads of a layer, which all keep the same tokens,
  and averaged over the tokens of a chunk. Tokens that the method protects count
  by their high scores alone. An incomplete last chunk competes with its mean.
  Where less than one chunk is kept, or the row is shorter than one, the method
  selects tokens one by one.

  Source: kvpress's ChunkKVPress, a reading of Liu et al., arXiv 2502.00299; for
  the paper's, see `ChunkKV`.

  Attributes:
    over: the method that scores tokens.
    chunk: tokens per chunk.
  """

  chunk: int = 20

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, chunk=1)
    if not isinstance(self.over, RanksGroups):
      raise InputError(
        f"Chunks are ranked by the scores of their tokens; "
        f"{name_of(self.over)} gives no scores to single tokens."
      )
    if self.over.allocation.prescribes:
      raise InputError(
        f"{name_of(self.over)} keeps its own share of the parts of a "
        "prompt, not what whole chunks leave; use it without chunkkv.kvpress/."
      )
    if self.over.allocation.ragged:
      raise InputError(
        "All heads keep the same chunks; those of "
        f"{name_of(self.over)} share a budget."
      )

  @property
  def traits(self) -> Traits:
    """Those of the method, for whole prompts."""
    traits = self.over.traits.once("its chunks are those of a whole prompt")
    coarse = "its last chunk may be shorter than the others"
    return dataclasses.replace(traits, coarse=coarse)

  @property
  def allocation(self) -> WholeChunkCounts:
    """A number of whole chunks."""
    return WholeChunkCounts(self.chunk)

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> PyTree[Array]:
    """Evaluates by the method."""
    return self.over.evaluate(layer, cache, activations)

  def select(
    self, scores: PyTree[Array], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects the best chunks that fit, and what the user protects."""
    ranking = self.over
    assert isinstance(ranking, RanksGroups)
    valid, must_keep = cache.valid, budget.must_keep(cache)
    per_token = ranking.group_scores(scores, cache, budget)
    per_token = jnp.where(valid, per_token, 0.0)
    taken = jnp.sum(must_keep, axis=-1, dtype=jnp.int32)
    # What the user protects may also be in a chosen chunk: `taken` is an upper
    # bound, so that the budget holds.
    num_chunks = jnp.maximum(budget.per_head - taken, 0) // self.chunk
    chosen = among_largest(
      self._chunk_scores(per_token, valid),
      jnp.broadcast_to(num_chunks, valid.shape[:2]),
    )
    slots = cache.capacity
    width = min(self.chunk, slots)
    kept = jnp.repeat(chosen, width, axis=-1)[..., :slots] | must_keep
    # A row that fits the budget also keeps an incomplete last chunk.
    fits = jnp.sum(valid, axis=-1, dtype=jnp.int32) <= budget.per_head
    kept = valid & (kept | fits[..., None])
    whole = mask_to_slots(kept, budget.capacity)
    # Rows differ in which of the two applies, so both are computed.
    single = self.over.select(scores, cache, budget)
    return jnp.where((budget.per_head < self.chunk)[..., None], single, whole)

  def _chunk_scores(
    self, per_token: Float[Array, "B K T"], valid: Bool[Array, "B K T"]
  ) -> Float[Array, "B K C"]:
    """Mean scores of chunks, summed over the heads; -inf for empty ones."""
    total = jnp.sum(per_token, axis=1, keepdims=True)
    sizes = self._sum(valid[:, :1].astype(jnp.float32))
    means = self._sum(total) / jnp.maximum(sizes, 1.0)
    means = jnp.where(sizes > 0, means, -jnp.inf)
    return jnp.broadcast_to(means, (*per_token.shape[:2], means.shape[-1]))

  def _sum(self, x: Float[Array, " B #K T"]) -> Float[Array, " B #K C"]:
    return jnp.sum(by_chunk(x, self.chunk), axis=-1)
