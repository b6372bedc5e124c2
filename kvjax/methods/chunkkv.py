"""ChunkKV: the prefix is kept or evicted in whole chunks."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.kernels.chunks import by_chunk
from kvjax.kernels.select import among_largest, mask_to_slots
from kvjax.methods.base import LayerBudget, Method
from kvjax.methods.last_queries import window_mass
from kvjax.methods.snapkv import SnapKV
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least
from kvjax.selection import last_tokens, newest

Scope = Literal["layer", "head"]


@dataclasses.dataclass(frozen=True)
class ChunkKV(Method):
  """Ranks contiguous chunks by the window's attention to them.

  The votes of the observation window are summed per chunk and, by default,
  over all heads of the layer, which then keep the same tokens. An incomplete
  last chunk competes with its mean times the chunk size. With budget B, the
  window and floor((B - W) / c) chunks are kept.

  Source: Liu et al., arXiv 2502.00299.

  Attributes:
    window: W, number of last tokens, which are always kept.
    chunk: c, tokens per chunk.
    scope: "layer" selects the same chunks for all heads of a layer; "head"
      selects per head.
    layer_reuse: number of consecutive layers that share the selection of the
      first of them (the paper's layer-wise index reuse; 2 there).
  """

  window: int = 32
  chunk: int = 10
  scope: Scope = "layer"
  layer_reuse: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1, chunk=1, layer_reuse=1)

  @property
  def traits(self) -> Traits:
    """It reads the last W queries and keeps their tokens."""
    return Traits(
      whole_prompts_only="its chunks are those of a whole prompt",
      coarse="it keeps whole chunks",
      window=self.window,
      queries=self.window,
      protects=self.window,
      reuse=self.layer_reuse,
      joins_heads=self.scope == "layer",
    )

  @property
  def votes(self) -> SnapKV:
    """SnapKV with the same window."""
    return SnapKV(window=self.window, kernel=7, pooling="max")

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K C"]:
    """Scores every chunk; those outside the prefix get -inf."""
    del layer
    per_token = jnp.mean(window_mass(cache, activations, self.window), axis=2)
    prefix = self._prefix(cache)
    scores = self._sum(jnp.where(prefix, per_token, 0.0))
    sizes = self._sum(prefix.astype(jnp.float32))
    scores = scores * self.chunk / jnp.maximum(sizes, 1.0)
    if self.scope == "layer":
      total = jnp.sum(scores, axis=1, keepdims=True)
      scores = jnp.broadcast_to(total, scores.shape)
    return jnp.where(sizes > 0, scores, -jnp.inf)

  def select(
    self, scores: Float[Array, "B K C"], cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects the window and the best chunks that fit."""
    valid = cache.valid
    must_keep = budget.must_keep(cache)
    window = newest(valid, must_keep, budget.per_head, self.window)
    must_keep &= ~window
    # `newest` shortens the window only where no chunk fits, so W counts. A
    # protected token may also be in a chosen chunk: this is an upper bound.
    taken = self.window + jnp.sum(must_keep, axis=-1, dtype=jnp.int32)
    num_chunks = jnp.maximum(budget.per_head - taken, 0) // self.chunk
    # A row that fits the budget also keeps its incomplete last chunk.
    fits = jnp.sum(valid, axis=-1, dtype=jnp.int32) <= budget.per_head
    chosen = among_largest(scores, num_chunks) | fits[..., None]
    slots = cache.capacity
    per_token = self._tokens(chosen, slots)
    kept = window | must_keep | (per_token & self._prefix(cache))
    return mask_to_slots(kept, budget.capacity)

  def token_scores(
    self, scores: Float[Array, "B K C"], cache: LayerCache
  ) -> Float[Array, "B K T"]:
    """Gives each token the score of its chunk."""
    per_token = self._tokens(scores, cache.capacity)
    return jnp.where(self._prefix(cache), per_token, -jnp.inf)

  def _prefix(self, cache: LayerCache) -> Bool[Array, "B K T"]:
    return cache.valid & ~last_tokens(cache.valid, self.window)

  def _sum(self, x: Float[Array, "B K T"]) -> Float[Array, "B K C"]:
    return jnp.sum(by_chunk(x, self.chunk), axis=-1)

  def _tokens(
    self, x: Shaped[Array, "B K C"], slots: int
  ) -> Shaped[Array, "B K T"]:
    """Gives each token what its chunk has."""
    return jnp.repeat(x, min(self.chunk, slots), axis=-1)[..., :slots]
