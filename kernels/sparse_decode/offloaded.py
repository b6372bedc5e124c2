"""Attention to listed slots of arrays in host memory, by the host."""

from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.host_memory import run_on_host
from kvjax.kernels.sparse_decode.xla import (
  Empty,
  Sums,
  listed_logits,
  sum_values,
  take_listed,
)


def sparse_decode_host(
  queries: Float[Array, "B N D"],
  keys: Float[Array, "L B K T D"],
  values: Float[Array, "L B K T Dv"],
  slots: Int[Array, "B H M"],
  bias: Float[Array, "B N M"] | None,
  layer: Int[Array, ""],
  options: AttentionOptions = PLAIN,
) -> Partial:
  """Host version of `kvjax.kernels.sparse_decode.sparse_decode`.

  Only queries and lists go to the host, and only the attention comes back.
  """

  def attend(
    queries: Float[Array, "B N D"],
    keys: Float[Array, "L B K T D"],
    values: Float[Array, "L B K T Dv"],
    slots: Int[Array, "B H M"],
    bias: Float[Array, "B N M"] | None,
    layer: Int[Array, ""],
    empty: Empty,
  ) -> Sums:
    logits = listed_logits(queries, take_listed(keys, layer, slots), options)
    values = take_listed(values, layer, slots)
    return sum_values(logits, values, slots >= 0, bias, empty, options)

  empty = Empty.of(values.dtype)
  operands = queries, keys, values, slots, bias, layer, empty
  # The division follows on the device: `Partial.of` creates arrays.
  sums: Sums = run_on_host(attend, *operands)
  return sums.finish(queries.dtype)
