"""SimLayerKV: layers whose attention is on the ends keep these alone."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation
from kvjax.allocation.whole_model import WholeModel
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.last_queries import window_queries, window_weights
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least
from kvjax.selection import last_tokens


@dataclasses.dataclass(frozen=True)
class SimLayer(ScoringMethod):
  """Scores all tokens of a layer by the attention that is not on its ends.

  A layer is lazy if the last queries attend to little but the first tokens and
  the most recent ones. Its other tokens then score low, all of them alike, and
  a budget, which all layers share, evicts from the laziest layers first. The
  paper evicts from layers whose score is below 1 less its threshold, as
  `kvjax.Threshold` does.

  Source: Zhang et al., arXiv 2410.13846, with the constants of kvpress. Every
  row of a batch decides for itself; kvpress takes the mean.

  Attributes:
    sinks: number of first tokens that are always kept.
    recent: number of tokens before the last queries whose attention counts as
      laziness; the last `recent` - W tokens of the prompt are always kept.
    window: W, number of last queries.
  """

  sinks: int = 4
  recent: int = 1024
  window: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, sinks=0, window=1, recent=self.window + 1)

  @property
  def traits(self) -> Traits:
    """Its layers share a budget once, and it keeps the recent tokens."""
    return Traits(
      whole_prompts_only="its layers share a budget once, after the prompt",
      queries=self.window,
      protects=self.recent - self.window,
      score_range=(0.0, 1.0),
    )

  @property
  def allocation(self) -> Allocation:
    """All layers share a budget."""
    return WholeModel()

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes one number for all tokens of a row, between 0 and 1."""
    del layer
    valid = cache.valid
    weights = window_weights(cache, activations, self.window)
    # The window's attention to itself does not count.
    at_ends = last_tokens(valid, self.recent + self.window)
    at_ends |= cache.positions < self.sinks
    at_ends &= ~last_tokens(valid, self.window)
    _, positions = window_queries(cache, activations, self.window)
    queries = jnp.sum((positions >= 0).astype(jnp.float32), axis=1)
    mass = jnp.where(at_ends[:, :, None, None], weights, 0.0)
    heads = weights.shape[1] * weights.shape[2]
    total = jnp.sum(mass, axis=(1, 2, 3, 4)) / jnp.maximum(queries, 1.0)
    left = 1.0 - total / heads
    return jnp.broadcast_to(left[:, None, None], valid.shape)

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B #K"]
  ) -> Bool[Array, "B K T"]:
    """The ends; of a smaller budget, the sinks and fewer recent tokens."""
    first = jnp.minimum(self.sinks, counts)
    recent = jnp.minimum(self.recent - self.window, counts - first)
    sinks = cache.valid & (cache.positions < first[:, :, None])
    return sinks | last_tokens(cache.valid, recent)
