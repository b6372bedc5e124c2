"""DropKV: keep tokens without which the last outputs would change most."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.methods.base import ScoringMethod
from kvjax.methods.heads import window_weights
from kvjax.methods.snapkv import pool
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_odd
from kvjax.selection import age


@dataclasses.dataclass(frozen=True)
class DropKV(ScoringMethod):
  """Scores a token by how much the last outputs change if it is dropped.

  Without token u, whose weight is p and whose value is v, the attention output
  o of a query changes by p / (1 - p) (o - v). The score is the squared length
  of this change, summed over the last W queries, averaged over the group, and
  averaged over neighboring tokens.

  Source: "DropKV" (OpenReview MqfNzH3TVH), with the defaults of the authors'
  code, but in float32 throughout.

  Attributes:
    window: W, number of last tokens, which are always kept.
    kernel: odd width of the average, which divides by it at the ends too; 1 for
      none.
    epsilon: added to 1 - p.
  """

  window: int = 8
  kernel: int = 11
  epsilon: float = 1e-6

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1, epsilon=0)
    check_odd(self, "kernel")

  @property
  def traits(self) -> Traits:
    """It reads the last W queries and keeps their tokens."""
    return Traits(window=self.window, protects=self.window, weighs=True)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the averaged changes."""
    del layer
    valid = cache.valid
    values = cache.values.astype(jnp.float32)
    values = jnp.where(valid[..., None], values, 0.0)
    # Changes are differences of values, so the mean is taken out: the squares
    # below would cancel if it were large.
    count = jnp.maximum(jnp.sum(valid.astype(jnp.float32), axis=-1), 1.0)
    center = jnp.sum(values, axis=2) / count[..., None]
    values = jnp.where(valid[..., None], values - center[:, :, None], 0.0)
    weights = window_weights(cache, activations, self.window)
    outputs = jnp.einsum("bkgwt,bktd->bkgwd", weights, values)
    if activations.sinks is not None:
      # Outputs add up to less than one weight; the rest is at -center.
      missing = 1.0 - jnp.sum(weights, axis=-1, keepdims=True)
      outputs -= missing * center[:, :, None, None]
    products = jnp.einsum("bkgwd,bktd->bkgwt", outputs, values)
    squares = jnp.sum(values**2, axis=-1)[:, :, None, None]
    lengths = jnp.sum(outputs**2, axis=-1, keepdims=True)
    distances = jnp.maximum(squares - 2 * products + lengths, 0.0)
    odds = weights / (1.0 - weights + self.epsilon)
    changes = jnp.sum(odds**2 * distances, axis=3)
    return pool(jnp.mean(changes, axis=2), valid, self.kernel, "avg")

  def protected(
    self, cache: LayerCache, counts: Int[Array, "B #K"]
  ) -> Bool[Array, "B K T"]:
    """The last W tokens."""
    del counts
    valid = cache.valid
    return valid & (age(valid) <= self.window)
