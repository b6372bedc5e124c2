"""CurDKV: keep tokens whose keys and values have large leverage."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.heads import Head
from kvjax.methods.headwise import HeadwiseMethod
from kvjax.methods.leverage import gaussian_sketch
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least


@dataclasses.dataclass(frozen=True)
class Cur(HeadwiseMethod):
  """Scores a token by approximate leverages of its key and its value.

  The leverage of a row in a matrix says how much the matrix loses without it;
  here it is the row's squared norm, as a share of those of its block of
  neighbors. The score is the product of both shares, as a share of the head's.

  Source: Sengupta et al., arXiv 2509.15038 (CurDKV), as kvpress's CURPress
  reads it.

  Attributes:
    leverage: the "product" of both shares, their "mean", that of the "key" or
      that of the "value".
    block: tokens per block; the last one may be shorter. 0 for one block.
    sinks: number of first tokens that are always kept.
    sketch: width that keys and values are projected to at random first; 0 for
      none.
    seed: seed of the projection, which all heads and layers share.
  """

  leverage: Literal["product", "mean", "key", "value"] = "product"
  block: int = 16
  sinks: int = 4
  sketch: int = 0
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, block=0, sinks=0, sketch=0, seed=0)

  @property
  def traits(self) -> Traits:
    """Its scores are shares; they depend on a seed with a sketch."""
    return Traits(
      weighs=self.leverage == "key",
      sinks=self.sinks,
      stochastic=self.sketch > 0,
      queries=0,
    )

  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Computes the head's shares of leverage, which sum to 1."""
    keys, values = head.keys, head.values
    if self.sketch:
      width = max(keys.shape[-1], values.shape[-1])
      key = jax.random.key(self.seed)
      matrix = gaussian_sketch(key, width, self.sketch)
      keys = keys @ matrix[: keys.shape[-1]]
      values = values @ matrix[: values.shape[-1]]
    by_key = self._shares(jnp.sum(keys**2, axis=-1), head.valid)
    by_value = self._shares(jnp.sum(values**2, axis=-1), head.valid)
    match self.leverage:
      case "product":
        scores = by_key * by_value
      case "mean":
        scores = (by_key + by_value) / 2
      case "key":
        scores = by_key
      case "value":
        scores = by_value
    return _divide(scores, jnp.sum(scores, keepdims=True))

  def _shares(
    self, norms: Float[Array, " T"], valid: Bool[Array, " T"]
  ) -> Float[Array, " T"]:
    """Divides squared norms by their sum over the block of each token."""
    if not self.block:
      return _divide(norms, jnp.sum(norms, keepdims=True))
    # By the number of the token, as rows may have empty slots between tokens.
    number = jnp.maximum(jnp.cumsum(valid, dtype=jnp.int32) - 1, 0)
    block = number // self.block
    sums = jax.ops.segment_sum(norms, block, -(-len(norms) // self.block))
    return _divide(norms, sums[block])


def _divide(
  part: Float[Array, " T"], whole: Float[Array, " #T"]
) -> Float[Array, " T"]:
  """Divides; 0 where a whole block is 0."""
  return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1.0), 0.0)
