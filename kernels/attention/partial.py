"""Attention to a subset of the keys, and the merge of two subsets."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.kernels.mesh_axes import Spread


class Partial(NamedTuple):
  """Attention to a set of keys.

  Attributes:
    output: softmax-weighted values; zeros for a query without visible keys.
    lse: log-sum-exp of the scaled logits, float32; -inf for such a query.
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
    """Builds the result from the final state of an online softmax.

    Args:
      largest: largest logit, -inf for a query without visible keys.
      total: sum of exp(logit - largest).
      weighted: sum of the values, weighted by the same exponentials.
      dtype: of the output.
    """
    # Without visible keys: 0 / 1 = 0, and -inf + log 1 = -inf.
    positive = jnp.where(total > 0, total, 1.0)
    output = (weighted / positive[..., None]).astype(dtype)
    return cls(output, largest + jnp.log(positive))


def merge(one: Partial, other: Partial) -> Partial:
  """Combines attention to two disjoint sets of keys."""
  # Outputs are normalized, so exp(lse) is the total that each one represents.
  largest = jnp.maximum(one.lse, other.lse)
  shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
  first, second = jnp.exp(one.lse - shift), jnp.exp(other.lse - shift)
  weighted = first[..., None] * one.output.astype(jnp.float32)
  weighted += second[..., None] * other.output.astype(jnp.float32)
  return Partial.of(largest, first + second, weighted, one.output.dtype)


def merge_devices(partial: Partial, axis: Spread) -> Partial:
  """Combines attention to the disjoint keys of the devices of mesh axes.

  Args:
    partial: this device's, inside `jax.shard_map`.
    axis: the mesh axes.

  Returns:
    The same on all of these devices.
  """
  largest = jax.lax.pmax(partial.lse, axis)
  shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
  share = jnp.exp(partial.lse - shift)
  weighted = share[..., None] * partial.output.astype(jnp.float32)
  total, weighted = jax.lax.psum((share, weighted), axis)
  return Partial.of(largest, total, weighted, partial.output.dtype)


def with_sinks(partial: Partial, sinks: Float[Array, " N"]) -> Partial:
  """Adds an attention sink, a logit without a value, to each head.

  The logits join the softmax denominator once, as in gpt-oss. If partial
  results are merged, add the sinks after the last merge. A query without
  visible keys keeps its zeros.

  Args:
    partial: attention of N heads, which are the second axis.
    sinks: one logit per head; -inf for none.
  """
  other_axes = (0, *range(2, partial.lse.ndim))
  logits = jnp.expand_dims(sinks.astype(jnp.float32), other_axes)
  lse = jnp.logaddexp(partial.lse, logits)
  # exp(-inf) = 0 leaves the zeros of a query that attends to nothing.
  share = jnp.exp(partial.lse - jnp.where(jnp.isfinite(lse), lse, 0.0))
  output = share[..., None] * partial.output.astype(jnp.float32)
  return Partial(output.astype(partial.output.dtype), lse)
