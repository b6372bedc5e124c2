"""The attention over a packed cache that the engine calls."""

from typing import Literal

from jaxtyping import Array, Float, Int

from kernels.attention import Partial
from kernels.paged_attention.reference import paged_attention_reference
from kernels.paged_attention.xla import paged_attention_xla

Implementation = Literal["xla", "reference"]

_IMPLEMENTATIONS = {
  "xla": paged_attention_xla,
  "reference": paged_attention_reference,
}


def paged_attention(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B R P D"],
  values: Float[Array, "B R P D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
  kv_heads: int,
  implementation: Implementation = "xla",
) -> Partial:
  """As `kernels.attention.partial_attention`, over R pages of P slots a row.

  A KV head may have any number of the pages, wherever they stand, so that time
  and memory follow R P: heads that hold more cost what others hold less.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys; what empty slots and unused pages hold has no effect.
    values: values, likewise.
    query_positions: place of each query in its row, -1 for padding.
    key_positions: place of each slot's token in its row, -1 for empty.
    heads: KV head of each page, -1 for an unused page.
    kv_heads: K.
    implementation: "reference" lets every head look at all pages.

  Returns:
    The attention output in the dtype of the queries, and its log-sum-exp.
  """
  return _IMPLEMENTATIONS[implementation](
    queries, keys, values, query_positions, key_positions, heads, kv_heads
  )
