"""Attention to some of the keys, and how two such parts become one."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class Partial(NamedTuple):
  """Attention to a set of keys.

  Attributes:
    output: softmax-weighted values; zeros where no key was seen.
    lse: log of the sum of the exponentials of the scaled logits, float32;
      -inf where no key was seen.
  """

  output: Float[Array, "*B S D"]
  lse: Float[Array, "*B S"]

  @classmethod
  def of(
    cls,
    largest: Float[Array, "*B S"],
    total: Float[Array, "*B S"],
    weighted: Float[Array, "*B S D"],
    dtype: DTypeLike,
  ) -> "Partial":
    """What an online softmax has found.

    Args:
      largest: largest logit, -inf where no key was seen.
      total: sum of exp(logit - largest).
      weighted: the values, weighted by the same exponentials.
      dtype: of the output.
    """
    positive = jnp.where(total > 0, total, 1.0)
    output = (weighted / positive[..., None]).astype(dtype)
    return cls(output, largest + jnp.log(positive))


def merge(one: Partial, other: Partial) -> Partial:
  """Attention to the union of two disjoint sets of keys."""
  largest = jnp.maximum(one.lse, other.lse)
  shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
  first, second = jnp.exp(one.lse - shift), jnp.exp(other.lse - shift)
  weighted = first[..., None] * one.output.astype(jnp.float32)
  weighted += second[..., None] * other.output.astype(jnp.float32)
  return Partial.of(largest, first + second, weighted, one.output.dtype)


def with_sinks(partial: Partial, sinks: Float[Array, " N"]) -> Partial:
  """Attention that also looks at a sink, which has a logit and no value.

  The logits join the denominator of the softmax, as in gpt-oss: where parts
  are merged, of all of them together, once. What sees no key keeps zeros.

  Args:
    partial: attention of N heads, whose axis is the second.
    sinks: a logit for each head; -inf for none.
  """
  others = (0, *range(2, partial.lse.ndim))
  logits = jnp.expand_dims(sinks.astype(jnp.float32), others)
  lse = jnp.logaddexp(partial.lse, logits)
  share = jnp.exp(partial.lse - jnp.where(jnp.isfinite(lse), lse, 0.0))
  output = share[..., None] * partial.output.astype(jnp.float32)
  return Partial(output.astype(partial.output.dtype), lse)
