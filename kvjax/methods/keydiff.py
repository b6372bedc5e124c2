"""KeyDiff: evict the keys most similar to the mean key."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.heads import Head
from kvjax.methods.headwise import HeadwiseMethod
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_share
from kvjax.selection import floor_share, last_tokens

Anchor = Literal[
  "mean_unit", "pairwise", "median_unit", "median_raw", "mean_raw"
]
Metric = Literal["cosine", "dot", "euclid"]

_TINY = 1e-12


@dataclasses.dataclass(frozen=True)
class KeyDiff(HeadwiseMethod):
  """Keeps the keys least similar to an anchor of all keys.

  With unit keys u_i and mu = mean u_i, the score is -cos(mu, k_i). Neither
  sinks nor recent tokens are protected.

  Source: arXiv 2504.15364, Section 3 and its ablations of anchor, metric and
  recent tokens.

  Attributes:
    anchor: mean or channel-wise median of unit or raw keys; "pairwise" sums
      the cosines with all keys, which ranks keys like "mean_unit".
    metric: "cosine"; "dot" is -mu.k_i; "euclid" is +|mu - k_i|.
    recent_frac: share of the budget for the newest tokens.
  """

  anchor: Anchor = "mean_unit"
  metric: Metric = "cosine"
  recent_frac: float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_share(self, "recent_frac")
    if self.anchor == "pairwise" and self.metric != "cosine":
      raise InputError("anchor=pairwise is defined for metric=cosine only.")

  @property
  def traits(self) -> Traits:
    """It reads keys alone."""
    return Traits(queries=0)

  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Computes the dissimilarity of every key to the anchor."""
    # Scores of empty slots are ignored, so that only the anchor needs a masked
    # copy of the keys.
    keys = head.cached_keys.astype(jnp.float32)
    norms = jnp.maximum(jnp.linalg.norm(keys, axis=-1), _TINY)
    inverse = jnp.where(head.valid, 1 / norms, 0.0)
    anchor = self._anchor(head, inverse)
    if self.metric == "euclid":
      return jnp.linalg.norm(keys - anchor[None], axis=-1)
    dots = jnp.sum(keys * anchor[None], axis=-1)
    if self.metric == "dot":
      return -dots
    length = jnp.maximum(jnp.linalg.norm(anchor), _TINY)
    return -dots * inverse / (1 if self.anchor == "pairwise" else length)

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B #K"]
  ) -> Bool[Array, "B K T"]:
    """The newest `recent_frac` of the budget."""
    recent = floor_share(counts, self.recent_frac)
    return last_tokens(cache.valid, recent)

  def _anchor(
    self, head: Head, inverse: Float[Array, " T"]
  ) -> Float[Array, " D"]:
    raw = self.anchor.endswith("raw")
    rows = head.keys if raw else head.keys * inverse[:, None]
    if self.anchor.startswith("median"):
      # The zeros of empty slots would shift a median; NaN is left out of it.
      return jnp.nanmedian(
        jnp.where(head.valid[:, None], rows, jnp.nan), axis=0
      )
    # Empty slots are zero and add nothing to the sum.
    total = jnp.sum(rows, axis=0)
    if self.anchor == "pairwise":
      # (U U^T) 1 without the T x T matrix.
      return total
    count = jnp.maximum(jnp.sum(head.valid.astype(jnp.float32)), 1.0)
    return total / count
