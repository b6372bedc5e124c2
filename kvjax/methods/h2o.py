"""H2O: keep the heavy hitters of all attention so far and recent tokens."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.heads import by_kv_head
from kvjax.kernels.attention_mass import causal_mass
from kvjax.methods.base import ScoringMethod
from kvjax.methods.snapkv import pool, value_norms
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_share
from kvjax.selection import floor_share, last_tokens


@dataclasses.dataclass(frozen=True)
class H2O(ScoringMethod):
  """Scores a token by the attention of all queries, averaged over the group.

  The weights are summed in tiles of queries, so that memory grows linearly with
  the prompt, not quadratically.

  Source: Zhang et al., arXiv 2306.14048.

  Attributes:
    recent_frac: share of the budget for the newest tokens; 0 in KeyDiff's
      comparison.
    recent: number of newest tokens to protect; replaces the share if not 0.
    normalize: divide by the number of queries that could attend to the token.
    paper_postproc: scale by |v_i| and pool with kernel 3, as Compactor's paper
      does for all attention scores.
  """

  recent_frac: float = 0.5
  recent: int = 0
  normalize: bool = False
  paper_postproc: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    check_share(self, "recent_frac")
    check_least(self, recent=0)

  @property
  def traits(self) -> Traits:
    """Its scores are weights of attention, with `paper_postproc` of values."""
    return Traits(weighs=not self.paper_postproc, protects=self.recent)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the accumulated attention."""
    del layer
    scores = cache.remembered
    # A whole prompt is scored without `observe`: its block is all there is.
    if scores is None:
      scores = _received(cache, activations)
    if self.normalize:
      newest = jnp.maximum(
        jnp.max(activations.positions, axis=-1, initial=-1)[:, None],
        jnp.max(cache.positions, axis=-1),
      )
      # A token at p is visible to the queries p to newest, itself included.
      observers = jnp.maximum(newest[..., None] + 1 - cache.positions, 1)
      scores = scores / observers.astype(jnp.float32)
    if self.paper_postproc:
      scores = pool(scores * value_norms(cache), cache.valid, 3, "avg")
    return scores

  def observe(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> LayerCache:
    """Accumulates the attention that each token receives from the block."""
    del layer
    received = _received(cache, activations)
    if cache.remembered is not None:
      received = cache.remembered + received
    return dataclasses.replace(cache, remembered=received)

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B #K"]
  ) -> Bool[Array, "B K T"]:
    """The newest tokens."""
    recent = (
      jnp.full_like(counts, self.recent)
      if self.recent
      else floor_share(counts, self.recent_frac)
    )
    return last_tokens(cache.valid, recent)


def _received(
  cache: LayerCache, activations: Activations
) -> Float[Array, "B K T"]:
  """Attention of the block's queries to every slot, mean over the group."""
  mass = causal_mass(
    activations.queries,
    cache.keys,
    activations.positions,
    cache.positions,
    options=activations.attention,
    sinks=activations.sinks,
  )
  return jnp.mean(by_kv_head(mass, cache.keys.shape[1]), axis=2)
