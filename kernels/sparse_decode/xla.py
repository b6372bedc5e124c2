"""Attention to listed slots in XLA, over a gathered copy of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.quantized import Quantized, dequantize
from kvjax.kernels.stacks import gather_slots

LOWEST = float(jnp.finfo(jnp.float32).min)


class Empty(NamedTuple):
  """What replaces empty places of a list, as arrays.

  Attributes:
    logit: -inf.
    value: zero, in the dtype of the values.
  """

  logit: Float[Array, ""]
  value: Float[Array, ""]

  @classmethod
  def of(cls, dtype: DTypeLike) -> "Empty":
    """Makes the replacements for values of a dtype."""
    return cls(jnp.full((), -jnp.inf, jnp.float32), jnp.zeros((), dtype))


class Sums(NamedTuple):
  """Final state of a softmax; see `Partial.of`."""

  largest: Float[Array, "B N"]
  total: Float[Array, "B N"]
  weighted: Float[Array, "B N Dv"]

  def finish(self, dtype: DTypeLike) -> Partial:
    """Divides by the total; queries without slots get zeros and -inf."""
    largest = jnp.where(self.total > 0, self.largest, -jnp.inf)
    return Partial.of(largest, self.total, self.weighted, dtype)


def sparse_decode_xla(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None,
  logits: Float[Array, "B N M"] | None,
  layer: Int[Array, ""],
  options: AttentionOptions = PLAIN,
  page: int = 1,
) -> Partial:
  """XLA version of `kvjax.kernels.sparse_decode.sparse_decode`."""
  # On CPUs, slices of whole pages take as long as those of their slots.
  del page

  def gather(
    x: Float[Array, "L B K T D"] | Quantized,
  ) -> Float[Array, "B H M D"]:
    rows = jax.tree.map(lambda each: take_listed(each, layer, slots), x)
    listed: Array = dequantize(rows, queries.dtype)
    return listed

  if logits is None:
    logits = listed_logits(queries, gather(keys), options)
  listed = gather(values)
  empty = Empty.of(listed.dtype)
  sums = sum_values(logits, listed, slots >= 0, bias, empty, options)
  return sums.finish(queries.dtype)


def take_listed(
  x: Shaped[Array, "L B K T D"],
  layer: Int[Array, ""],
  slots: Int[Array, "B H M"],
) -> Shaped[Array, "B H M D"]:
  """Copies the slots of each list; slot 0 for -1, which may contain NaN."""
  batch, lists, num_slots = slots.shape
  # Lists of one KV head are adjacent: [B, H, M] is [B, K, (H / K) M].
  index = jnp.maximum(slots, 0).reshape(batch, x.shape[2], -1)
  rows = gather_slots(x, layer, index)
  return rows.reshape(batch, lists, num_slots, x.shape[-1])


def listed_logits(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "B H M D"],
  options: AttentionOptions,
) -> Float[Array, "B N M"]:
  """Computes float32 scaled logits of listed keys, before the softcap."""
  batch, heads, dim = queries.shape
  lists, num_slots = keys.shape[1:3]
  grouped = queries.reshape(batch, lists, heads // lists, dim)
  products = jnp.einsum(
    "bhgd,bhmd->bhgm", grouped, keys, preferred_element_type=jnp.float32
  )
  products = products.reshape(batch, heads, num_slots)
  return products * options.scale_of(dim)


def sum_values(
  logits: Float[Array, "B N M"],
  values: Float[Array, "B H M Dv"],
  valid: Bool[Array, "B H M"],
  bias: Float[Array, "B N M"] | None,
  empty: Empty,
  options: AttentionOptions,
) -> Sums:
  """Computes the sums of the softmax over listed rows.

  Like `listed_logits`, it creates no arrays, so that the host can run it; see
  `kvjax.kernels.host_memory.run_on_host`.

  Args:
    logits: scaled logits before the softcap; arbitrary where a list is empty.
    values: the listed values; arbitrary where a list is empty.
    valid: mask of the places that list a slot.
    bias: as for `sparse_decode`.
    empty: replacements where a list is empty.
    options: the softcap.
  """
  batch, heads, _ = logits.shape
  logits = options.cap(logits)
  if bias is not None:
    logits = logits + bias
  logits = logits.reshape(batch, valid.shape[1], -1, valid.shape[2])
  logits = jnp.where(valid[:, :, None], logits, empty.logit)
  largest = jax.lax.reduce_max(logits, (logits.ndim - 1,))
  # Finite even without slots, since -inf - -inf is NaN. `where` with a constant
  # would create an array, which the host must not do.
  weights = jnp.exp(logits - jnp.maximum(largest, LOWEST)[..., None])
  # Slot 0 stands in for -1 and may contain NaN, and 0 * NaN is NaN.
  values = jnp.where(valid[..., None], values, empty.value)
  weighted = jnp.einsum(
    "bhgm,bhmd->bhgd",
    weights.astype(values.dtype),
    values,
    preferred_element_type=jnp.float32,
  )
  return Sums(
    largest.reshape(batch, heads),
    jnp.sum(weights, axis=-1).reshape(batch, heads),
    weighted.reshape(batch, heads, values.shape[-1]),
  )
