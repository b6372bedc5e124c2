"""TOVA: evict the tokens that the newest query attends to least."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.last_queries import window_mass
from kvjax.methods.traits import Traits
from kvjax.selection import last_tokens

Scope = Literal["layer", "group"]


@dataclasses.dataclass(frozen=True)
class Tova(ScoringMethod):
  """Scores tokens by the attention of the last query.

  Source: Oren et al., arXiv 2401.06104.

  Attributes:
    scope: "layer" averages over all query heads, so that every head of a layer
      keeps the same tokens; "group" averages per KV head, as in KeyDiff's
      comparison.
    protect_last: whether the last token is always kept.
  """

  scope: Scope = "layer"
  protect_last: bool = False

  @property
  def traits(self) -> Traits:
    """It needs the last query; `scope` says whether heads keep the same."""
    return Traits(
      window=1, queries=1, weighs=True, joins_heads=self.scope == "layer"
    )

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes attention weights of the last query, averaged over heads."""
    del layer
    scores = jnp.mean(window_mass(cache, activations, 1), axis=2)
    if self.scope == "group":
      return scores
    mean = jnp.mean(scores, axis=1, keepdims=True)
    return jnp.broadcast_to(mean, scores.shape)

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B #K"]
  ) -> Bool[Array, "B K T"]:
    """The last token, if `protect_last`."""
    del counts
    valid = cache.valid
    # Ages of tokens begin at 1, so that 0 protects none.
    return last_tokens(valid, int(self.protect_last))
