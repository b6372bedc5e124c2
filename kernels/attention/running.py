"""Online softmax inside a TPU kernel."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Running(NamedTuple):
  """The state of an online softmax.

  Attributes:
    largest: largest logit so far, -inf before the first visible key.
    total: sum of exp(logit - largest).
    weighted: sum of the values, weighted by the same exponentials.
  """

  largest: Float[Array, "S 1"]
  total: Float[Array, "S 1"]
  weighted: Float[Array, "S D"]

  @classmethod
  def none(cls, queries: int, dim: int) -> "Running":
    """Returns the state before the first key."""
    return cls(
      jnp.full((queries, 1), -jnp.inf, jnp.float32),
      jnp.zeros((queries, 1), jnp.float32),
      jnp.zeros((queries, dim), jnp.float32),
    )

  def after(
    self,
    queries: Float[Array, "S D"],
    keys: Float[Array, "C D"],
    values: Float[Array, "C D"],
    visible: Bool[Array, "#S C"],
    bias: Float[Array, "S C"] | None = None,
    key_scales: Float[Array, "1 C"] | None = None,
    value_scales: Float[Array, "1 C"] | None = None,
  ) -> "Running":
    """Returns the state after more keys.

    Args:
      queries: unscaled queries.
      keys: keys in the dtype of the products; masked keys may be NaN.
      values: values in the same dtype; masked values must be finite.
      visible: the attention mask.
      bias: added to the logits.
      key_scales: dequantization scales of keys; NaN only where masked.
      value_scales: dequantization scales of values; NaN only where masked.
    """
    product = functools.partial(
      jax.lax.dot_general,
      # By default the matrix units would round float32 to bfloat16.
      precision=jax.lax.Precision.HIGHEST
      if keys.dtype == jnp.float32
      else jax.lax.Precision.DEFAULT,
      preferred_element_type=jnp.float32,
    )
    logits = product(queries.astype(keys.dtype), keys, (((1,), (1,)), ((), ())))
    # Not the queries: scaled ones would be rounded to their dtype.
    logits = logits * queries.shape[-1] ** -0.5
    if key_scales is not None:
      # A slot has one scale, so it factors out of the sum over D.
      logits = logits * key_scales
    if bias is not None:
      logits = logits + bias
    logits = jnp.where(visible, logits, -jnp.inf)
    largest = jnp.maximum(self.largest, jnp.max(logits, axis=-1, keepdims=True))
    # Avoid -inf - -inf = NaN as long as no key is visible.
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    weights = jnp.exp(logits - shift)
    # Value scales belong to the values, so the denominator goes without them.
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if value_scales is not None:
      weights = jnp.where(visible, weights * value_scales, 0.0)
    added = product(
      weights.astype(values.dtype), values, (((1,), (0,)), ((), ()))
    )
    # exp(-inf) = 0 in the first step, where there is nothing to rescale.
    rescale = jnp.exp(self.largest - shift)
    return Running(
      largest, self.total * rescale + total, self.weighted * rescale + added
    )
