"""The attention functions that the engine calls."""

from typing import Literal

from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.chunked import attention_chunked
from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial, with_sinks
from kvjax.kernels.attention.reference import attention_reference
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.paged_attention.decoding import decode_attention
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
  """Computes softmax attention, scaled by D^-1/2, causal by positions.

  A query attends to the slots of its KV head whose position is neither
  negative (an empty slot) nor greater than its own. The contents of all other
  slots, NaN included, have no effect. A query that attends to no slot gets
  zeros. Values may be wider or narrower than keys.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys. Stacks of layers have one more leading axis.
    values: values, likewise; quantized ones are restored one chunk of slots at
      a time.
    query_positions: position of each query in its row, -1 for padding.
    key_positions: position of each slot's token in its row, -1 for empty.
    implementation: "chunked" never materializes all S x T logits.
    options: a sliding window, another scale, a softcap on the logits.
    sinks: one logit per query head that joins the softmax denominator and has
      no value; see `with_sinks`.
    layer: the layer to read of stacks.

  Returns:
    The attention output in the dtype of the queries.
  """
  partial = partial_attention(
    queries,
    keys,
    values,
    query_positions,
    key_positions,
    implementation,
    options,
    layer,
  )
  return (partial if sinks is None else with_sinks(partial, sinks)).output


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
  """Computes attention that can be merged with attention to other slots.

  The result has the log-sum-exp next to the output; arguments are those of
  `attention`. Sinks count once, so `with_sinks` adds them after the last merge.
  """
  (keys, values), layer = as_stack((keys, values), layer)
  attend = _IMPLEMENTATIONS[implementation]
  one_token = queries.shape[2] == 1 and implementation == "chunked"
  if one_token and target_platform() == "gpu":
    attend = decode_attention
  return attend(
    queries, keys, values, query_positions, key_positions, options, layer
  )
