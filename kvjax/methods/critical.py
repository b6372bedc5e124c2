"""CriticalKV: values count by what they add to the layer's output."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.kernels.select import slots_to_mask
from kvjax.labels import name_of
from kvjax.methods.around import Using, refuse_joined
from kvjax.methods.base import LayerBudget, ScoringMethod
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_share
from kvjax.selection import finite, floor_share, top_slots

# Tokens whose values are projected at once.
_TILE = 128


class CriticalScores(NamedTuple):
  """What a selection in two stages depends on.

  Attributes:
    scores: scores of the inner method.
    norms: norms of the values after the output projection.
  """

  scores: Float[Array, "B K T"]
  norms: Float[Array, "B K T"]


@dataclasses.dataclass(frozen=True)
class Critical(Using):
  """Selects by another method's scores, then by these times projected values.

  A share of the budget goes to the highest scores s. The rest goes to the
  highest (s + epsilon) z, where z is the L1 norm of the value after its query
  head's part of the output projection W_O, averaged over the group.

  If the heads of a layer compete for its budget (`ada/`), they do by s alone,
  and the two stages share the budget of each head. This is CriticalAdaKV. The
  first stage is no less than the floor of a head (`ada.kvpress/`).

  Source: Feng et al., arXiv 2502.03805, Algorithms 1 and 2.

  Attributes:
    over: the method that scores tokens, none below zero.
    epsilon: added to every score before it is multiplied.
    first_stage: share of the budget that goes by the scores alone, to three
      decimals, and at least one token unless it is 0.
  """

  epsilon: float = 1e-4
  first_stage: float = 0.5

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, epsilon=0)
    check_share(self, "first_stage")
    refuse_joined("critical/", self.over)
    name = name_of(self.over)
    if not isinstance(self.over, ScoringMethod):
      raise InputError(
        "critical/ multiplies scores of tokens that are final before the "
        f"budget is known; {name} gives none."
      )
    if not self.over.traits.weighs:
      raise InputError(
        "critical/ multiplies scores by the norms of values, so that they "
        "must be weights of 0 or more that no values are part of, such as "
        f"attention; those of {name} are not."
      )

  @property
  def traits(self) -> Traits:
    """Those of the inner method, and the output projection."""
    inner = self.over.traits
    return dataclasses.replace(
      inner.once("it reads the output projection, which no cache stores"),
      protects=inner.protects,
      activations=inner.activations | {"output_projection"},
    )

  @property
  def votes(self) -> ScoringMethod:
    """The inner method."""
    assert isinstance(self.over, ScoringMethod)
    return self.over

  def evaluate(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> CriticalScores:
    """Computes the inner scores, and the norms of projected values."""
    inner = self.votes
    # Epsilon is on the scale of one query's attention.
    scores = inner.as_weights(inner.evaluate(layer, cache, activations))
    assert activations.output_projection is not None
    return CriticalScores(
      finite(scores), projected_norms(cache, activations.output_projection)
    )

  def select(
    self, scores: CriticalScores, cache: LayerCache, budget: LayerBudget
  ) -> Int[Array, "B K M"]:
    """Selects in two stages; protected tokens are part of the first."""
    valid, counts = cache.valid, budget.per_head
    counts = jnp.broadcast_to(counts, valid.shape[:2])
    protected = self.votes.protected(cache, counts)
    must_keep = budget.must_keep(cache)
    first = floor_share(counts, self.first_stage)
    if self.first_stage:
      first = jnp.clip(first, 1, counts)
    if budget.safe is not None:
      first = jnp.maximum(first, jnp.minimum(budget.safe, counts))
    by_score = top_slots(
      scores.scores, valid, protected, first, cache.capacity, must_keep
    )
    return top_slots(
      (scores.scores + self.epsilon) * scores.norms,
      valid,
      protected | slots_to_mask(by_score, cache.capacity),
      counts,
      budget.capacity,
      must_keep,
    )

  def token_scores(
    self, scores: CriticalScores, cache: LayerCache
  ) -> Float[Array, "B K T"]:
    """Returns the scores of the second stage."""
    del cache
    return (scores.scores + self.epsilon) * scores.norms


def projected_norms(
  cache: LayerCache, projection: Float[Array, "N Dv E"]
) -> Float[Array, "B K T"]:
  """Computes the mean over the group of |v W_O|_1; 0 for empty slots.

  It is computed for a few tokens at a time: all projections together would be
  as large as the hidden states of N layers.
  """
  kv_heads = cache.positions.shape[1]
  heads, width, model_width = projection.shape
  by_group = projection.astype(jnp.float32).reshape(
    kv_heads, heads // kv_heads, width, model_width
  )

  def of_token(values: Float[Array, "B K Dv"]) -> Float[Array, "B K"]:
    projected = jnp.einsum("bkd,kgde->bkge", values, by_group)
    return jnp.mean(jnp.sum(jnp.abs(projected), axis=-1), axis=-1)

  norms = jax.lax.map(
    of_token, jnp.moveaxis(cache.float_values, 2, 0), batch_size=_TILE
  )
  return jnp.moveaxis(norms, 0, 2)
