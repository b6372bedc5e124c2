"""Online softmax, in XLA.

Queries that read the same KV head are one axis: on CPUs, products and maxima of
two are an eighth slower.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from kvjax.kernels.attention.options import AttentionOptions
from kvjax.kernels.attention.partial import Partial


class Online(NamedTuple):
  """The state of an online softmax.

  Attributes:
    largest: largest logit so far, -inf before the first visible key.
    total: sum of exp(logit - largest).
    weighted: sum of the values, weighted by the same exponentials.
  """

  largest: Float[Array, "B K S"]
  total: Float[Array, "B K S"]
  weighted: Float[Array, "B K S Dv"]

  @classmethod
  def none(cls, shape: tuple[int, ...], dim: int) -> "Online":
    """Returns the state before the first key.

    Args:
      shape: B, K and S.
      dim: the width of values.
    """
    return cls(
      jnp.full(shape, -jnp.inf, jnp.float32),
      jnp.zeros(shape, jnp.float32),
      jnp.zeros((*shape, dim), jnp.float32),
    )

  def after(
    self,
    queries: Float[Array, "B K S D"],
    keys: Float[Array, "B K C D"],
    values: Float[Array, "B K C Dv"],
    visible: Bool[Array, "#B #K S C"] | None,
    options: AttentionOptions,
  ) -> "Online":
    """Returns the state after more keys.

    Args:
      queries: unscaled queries.
      keys: keys; masked keys may be NaN.
      values: values; masked values must be finite.
      visible: the attention mask; None if all queries see all keys.
      options: scale and softcap. The mask includes the window.
    """
    # NaN in empty keys needs no mask: the logits it reaches are replaced.
    logits = jnp.einsum(
      "bksd,bkcd->bksc", queries, keys, preferred_element_type=jnp.float32
    )
    logits = options.cap(logits * options.scale_of(queries.shape[-1]))
    if visible is not None:
      logits = jnp.where(visible, logits, -jnp.inf)
    largest = jnp.maximum(self.largest, jnp.max(logits, axis=-1))
    # Until a key is visible, all are -inf, and -inf - -inf is NaN.
    finite = jnp.where(jnp.isfinite(largest), largest, 0.0)
    weights = jnp.exp(logits - finite[..., None])
    rescale = jnp.exp(self.largest - finite)
    added = jnp.einsum(
      "bksc,bkcd->bksd",
      # Products take the values' dtype; the sum of weights stays float32.
      weights.astype(values.dtype),
      values,
      preferred_element_type=jnp.float32,
    )
    return Online(
      largest,
      self.total * rescale + jnp.sum(weights, axis=-1),
      self.weighted * rescale[..., None] + added,
    )

  def partial(self, dtype: DTypeLike) -> Partial:
    """Returns the attention to all keys so far.

    Args:
      dtype: of the output.
    """
    return Partial.of(self.largest, self.total, self.weighted, dtype)
