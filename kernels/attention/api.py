"""The attention that the engine calls."""

from typing import Literal

from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.chunked import attention_chunked
from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial, with_sinks
from kvjax.kernels.attention.reference import attention_reference
from kvjax.kernels.quantized import Quantized
from kvjax.kernels.stacks import Layer, as_stack

Implementation = Literal["chunked", "reference"]

_IMPLEMENTATIONS = {
  "chunked": attention_chunked,
  "reference": attention_reference,
}


def attention(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "*L B K T D"] | Quantized,
  values: Float[Array, "*L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  implementation: Implementation = "chunked",
  options: AttentionOptions = PLAIN,
  sinks: Float[Array, " N"] | None = None,
  layer: Layer = None,
) -> Float[Array, "B N S Dv"]:
  """Softmax attention, scaled by D^-1/2, causal by positions.

  A query sees the slots of its KV head whose position is neither negative
  (empty) nor greater than its own; what else those slots hold, NaN included,
  has no effect. A query that sees nothing gets zeros. Values may be wider or
  narrower than keys.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys. Stacks of layers have one more axis in front.
    values: values, likewise; quantized ones are dequantized a chunk of slots
      at a time.
    query_positions: place of each query in its row, -1 for padding.
    key_positions: place of each slot's token in its row, -1 for empty.
    implementation: "chunked" never holds S x T logits.
    options: a window, another scale, a cap of the logits.
    sinks: for each query head a logit that joins the denominator of the
      softmax and has no value; see `with_sinks`.
    layer: of stacks, the layer to read.

  Returns:
    The attention output in the dtype of the queries.
  """
  found = partial_attention(
    queries,
    keys,
    values,
    query_positions,
    key_positions,
    implementation,
    options,
    layer,
  )
  return (found if sinks is None else with_sinks(found, sinks)).output


def partial_attention(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "*L B K T D"] | Quantized,
  values: Float[Array, "*L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  implementation: Implementation = "chunked",
  options: AttentionOptions = PLAIN,
  layer: Layer = None,
) -> Partial:
  """Attention to a part of the keys, to be merged with that to others.

  Arguments are those of `attention`. Sinks, which count once, are for
  `with_sinks` after the last merge.
  """
  (keys, values), layer = as_stack((keys, values), layer)
  return _IMPLEMENTATIONS[implementation](
    queries, keys, values, query_positions, key_positions, options, layer
  )
