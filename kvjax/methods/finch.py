"""FINCH: keep what the question attends to, and close the gaps."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, Uniform
from kvjax.allocation.per_chunk import PerChunk
from kvjax.cache.layers import LayerCache
from kvjax.kernels.chunks import by_chunk
from kvjax.kernels.select import mask_to_slots, slots_to_mask
from kvjax.methods.base import LayerBudget, Method
from kvjax.methods.last_queries import window_queries, window_weights
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least
from kvjax.selection import last_tokens, top_slots


@dataclasses.dataclass(frozen=True)
class Finch(Method):
  """Keeps the question and the tokens of the context that it attends to.

  The score of a token is its attention from the W tokens of the question, each
  multiplied by the number of tokens before it, averaged over the question and
  the group. The product makes up for late queries, which share their attention
  among more tokens. The name `finch` also moves the kept tokens to their places
  in the cache, which is `Rerotated`.

  Source: Corallo and Papotti, arXiv 2408.00167, as kvpress's FinchPress reads
  it.

  Attributes:
    window: W, number of last tokens, which are the question and are kept.
    chunk: tokens per chunk of the prompt, each of which keeps its own share;
      0 for the prompt as a whole.
    normalize: whether queries are multiplied by the number of tokens before
      them.
  """

  window: int = 32
  chunk: int = 0
  normalize: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1, chunk=0)

  @property
  def traits(self) -> Traits:
    """It needs the question, which ends a whole prompt."""
    return Traits(
      whole_prompts_only="the question is at the end of a whole prompt",
      queries=self.window,
      protects=0 if self.chunk else self.window,
      even="every chunk has its own share" if self.chunk else "",
    )

  @property
  def allocation(self) -> Allocation:
    """A share of each chunk, or of the prompt."""
    if not self.chunk:
      return Uniform()
    return PerChunk(self.chunk, ends=self.window)

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the attention of the question; that to itself is 0."""
    del layer
    weights = window_weights(cache, activations, self.window)
    _, positions = window_queries(cache, activations, self.window)
    if self.normalize:
      before = jnp.maximum(positions, 0).astype(jnp.float32)
      weights = weights * before[:, None, None, :, None]
    scores = jnp.mean(weights, axis=(2, 3))
    return jnp.where(self._question(cache), 0.0, scores)

  def select(
    self, scores: Float[Array, "B K T"], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects the question and the highest scores, of each chunk if any."""
    protected, must_keep = self._question(cache), budget.must_keep(cache)
    if budget.parts is None:
      return top_slots(
        scores,
        cache.valid,
        protected,
        budget.counts,
        budget.capacity,
        must_keep,
      )
    # Chunks are like heads that have slots of their own.
    batch, kv_heads, slots = scores.shape
    counts = jnp.broadcast_to(
      budget.parts[:, None], (batch, kv_heads, budget.parts.shape[1])
    )
    kept = top_slots(
      self._split(scores),
      self._split(cache.valid),
      self._split(protected),
      counts.reshape(batch, -1),
      min(self.chunk, slots),
      self._split(must_keep),
    )
    mask = slots_to_mask(kept, min(self.chunk, slots))
    mask = mask.reshape(batch, kv_heads, -1)
    return mask_to_slots(mask[..., :slots] & cache.valid, budget.capacity)

  def token_scores(
    self, scores: Float[Array, "B K T"], cache: LayerCache
  ) -> Float[Array, "B K T"]:
    """Returns the scores."""
    del cache
    return scores

  def _question(self, cache: LayerCache) -> Bool[Array, "B K T"]:
    return last_tokens(cache.valid, self.window)

  def _split(self, x: Shaped[Array, "B K T"]) -> Shaped[Array, "B H c"]:
    """Cuts the slots of every head into chunks, H = K C in all."""
    chunks = by_chunk(x, self.chunk)
    return chunks.reshape(len(x), -1, chunks.shape[-1])
