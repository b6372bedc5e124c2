"""DropKV: keep tokens without which the last outputs would change most."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods.base import ScoringMethod
from kvjax.methods.last_queries import window_weights
from kvjax.methods.snapkv import pool
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_odd


@dataclasses.dataclass(frozen=True)
class DropKV(ScoringMethod):
  """Scores a token by how much the last outputs change if it is dropped.

  Without token u, whose weight is p and whose value is v, the attention output
  o of a query changes by p / (1 - p) (o - v). The score is the squared length
  of this change, summed over the last W queries, averaged over the group, and
  averaged over neighboring tokens.

  Source: "DropKV" (OpenReview MqfNzH3TVH), with the defaults of the authors'
  code, but in float32 throughout unless `match_bf16` says otherwise.

  Attributes:
    window: W, number of last tokens, which are always kept.
    kernel: odd width of the average, which divides by it at the ends too; 1 for
      none.
    epsilon: added to 1 - p.
    match_bf16: whether p in p / (1 - p) is rounded to bfloat16, as in the
      authors' code. A token with nearly all of the attention of a query then
      has p = 1, and a change as large as epsilon allows.
  """

  window: int = 8
  kernel: int = 11
  epsilon: float = 1e-6
  match_bf16: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1, epsilon=0)
    check_odd(self, "kernel")
    if self.match_bf16 and not self.epsilon:
      raise InputError(
        "With match_bf16, epsilon must be above 0: p may be 1, and p / (1 - p) "
        "infinite."
      )

  @property
  def traits(self) -> Traits:
    """It reads the last W queries and keeps their tokens."""
    return Traits(window=self.window, queries=self.window, protects=self.window)

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes the averaged changes."""
    del layer
    valid = cache.valid
    values = cache.float_values
    # Changes are differences of values, so the mean is taken out: the squares
    # below would cancel if it were large.
    count = jnp.maximum(jnp.sum(valid.astype(jnp.float32), axis=-1), 1.0)
    center = jnp.sum(values, axis=2) / count[..., None]
    values = jnp.where(valid[..., None], values - center[:, :, None], 0.0)
    weights = window_weights(cache, activations, self.window)
    # With sinks, weights add up to less than one; the rest is at -center.
    missing = jnp.zeros((*weights.shape[:-1], 1), jnp.float32)
    if activations.sinks is not None:
      missing = jnp.maximum(1.0 - jnp.sum(weights, axis=-1, keepdims=True), 0.0)
    changes = self._changes(weights, values, missing, center)
    changes = jnp.mean(jnp.sum(changes, axis=3), axis=2)
    return pool(changes, valid, self.kernel, "avg")

  def _changes(
    self,
    weights: Float[Array, "B K G W T"],
    values: Float[Array, "B K T D"],
    missing: Float[Array, "B K G W 1"],
    center: Float[Array, "B K D"],
  ) -> Float[Array, "B K G W T"]:
    """Squared lengths of the changes of each query's output.

    Where one token has nearly all of the weight, the output is nearly its
    value, and 1 - p and o - v are differences of what is nearly equal. What
    its loss changes is therefore computed from the other tokens.

    Args:
      weights: attention weights.
      values: values, less `center`.
      missing: weight of what has no value, such as a sink.
      center: mean value.
    """
    slots = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 4)
    best = jnp.argmax(weights, axis=-1).astype(jnp.int32)
    is_best = slots == best[..., None]
    others = jnp.where(is_best, 0.0, weights)
    rest = jnp.sum(others, axis=-1, keepdims=True) + missing
    rest_output = jnp.einsum("bkgwt,bktd->bkgwd", others, values)
    rest_output -= missing * center[:, :, None, None]
    index = best.reshape(*best.shape[:2], -1, 1)
    best_value = jnp.take_along_axis(values, index, axis=2)
    best_value = best_value.reshape(rest_output.shape)
    outputs = rest_output + best_value * jnp.max(
      weights, axis=-1, keepdims=True
    )

    products = jnp.einsum("bkgwd,bktd->bkgwt", outputs, values)
    squares = jnp.sum(values**2, axis=-1)[:, :, None, None]
    lengths = jnp.sum(outputs**2, axis=-1, keepdims=True)
    distances = jnp.maximum(squares - 2 * products + lengths, 0.0)

    least = jnp.finfo(jnp.float32).tiny
    without_best = rest_output / jnp.maximum(rest, least)
    distance = jnp.sum((without_best - best_value) ** 2, axis=-1, keepdims=True)
    if self.match_bf16:
      # A conversion there and back could be optimized away.
      rounded = jax.lax.reduce_precision(weights, 8, 7)
      ratios = (rounded / (1.0 - rounded + self.epsilon)) ** 2
      return ratios * jnp.where(is_best, rest**2 * distance, distances)
    changes = (weights / (1.0 - others + self.epsilon)) ** 2 * distances
    share = rest / jnp.maximum(rest + self.epsilon, least)
    return jnp.where(is_best, (weights * share) ** 2 * distance, changes)
