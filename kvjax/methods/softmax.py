"""The softmax over slots that are visible."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def softmax(
  logits: Float[Array, "*B T"],
  visible: Bool[Array, "*#B T"],
  sinks: Float[Array, "*#B 1"] | None = None,
) -> Float[Array, "*B T"]:
  """Computes the softmax over the visible slots; 0 elsewhere.

  Args:
    logits: float32.
    visible: may have no slot at all, in which case the result is 0.
    sinks: logits of attention sinks, which get a share of the whole.
  """
  logits = jnp.where(visible, logits, -jnp.inf)
  total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  if sinks is not None:
    total = jnp.logaddexp(total, sinks)
  # Without any slot, the total is -inf.
  return jnp.where(visible, jnp.exp(logits - total), 0.0)
