"""The attention that the engine calls."""

from typing import Literal

from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.chunked import attention_chunked
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.attention.reference import attention_reference
from kvjax.kernels.quantised import Quantised

Implementation = Literal["chunked", "reference"]

_IMPLEMENTATIONS = {
  "chunked": attention_chunked,
  "reference": attention_reference,
}


def attention(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"] | Quantised,
  values: Float[Array, "B K T D"] | Quantised,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  implementation: Implementation = "chunked",
) -> Float[Array, "B N S D"]:
  """Softmax attention, scaled by D^-1/2, causal by positions.

  A query sees the slots of its KV head whose position is neither negative
  (empty) nor greater than its own; what else those slots hold, NaN included,
  has no effect. A query that sees nothing gets zeros.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys.
    values: values; quantised ones are made whole a chunk of slots at a time.
    query_positions: place of each query in its row, -1 for padding.
    key_positions: place of each slot's token in its row, -1 for empty.
    implementation: "chunked" never holds S x T logits.

  Returns:
    The attention output in the dtype of the queries.
  """
  return partial_attention(
    queries, keys, values, query_positions, key_positions, implementation
  ).output


def partial_attention(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"] | Quantised,
  values: Float[Array, "B K T D"] | Quantised,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  implementation: Implementation = "chunked",
) -> Partial:
  """As `attention`, with what merging it with attention elsewhere takes."""
  return _IMPLEMENTATIONS[implementation](
    queries, keys, values, query_positions, key_positions
  )
