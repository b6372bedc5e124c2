"""Attention over a packed cache, as the engine calls it."""

import functools

from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.kernels.attention.partial import Partial, merge_devices
from kvjax.kernels.dispatch import dispatch, on_mesh
from kvjax.kernels.paged_attention.spans import Span
from kvjax.kernels.paged_attention.xla import paged_attention_xla
from kvjax.kernels.programs import Programs
from kvjax.kernels.quantized import Quantized
from kvjax.kernels.stacks import Layer, as_stack

_PROGRAMS = Programs.of(paged_attention_xla)


def paged_attention(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "*L B R P D"] | Quantized,
  values: Float[Array, "*L B R P Dv"] | Quantized,
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
  kv_heads: int,
  options: AttentionOptions = PLAIN,
  layer: Layer = None,
  span: Span | None = None,
) -> Partial:
  """Softmax attention to R pages of P slots per row, causal by positions.

  A KV head may have any number of the pages, in any order. Time and memory are
  proportional to R P, whatever the heads' shares of the pages are, or to the
  pages of `span`. On a mesh, each device attends to its share of the pages;
  only queries and outputs move.

  Args:
    queries: rotated queries; head j reads KV head j // (N / K).
    keys: rotated keys; arbitrary in empty slots and unused pages. Stacks of
      layers have an additional leading axis.
    values: values; arbitrary where the keys are.
    query_positions: position of each query in its row, -1 for padding.
    key_positions: position of each slot's token in its row, -1 for empty.
    heads: KV head of each page, -1 for an unused page.
    kv_heads: K.
    options: window, scale and softcap; kernels support single tokens and plain
      attention only.
    layer: index of the layer in stacks.
    span: where the pages with a head are; None for anywhere.

  Returns:
    The attention output in the dtype of the queries, and its log-sum-exp.
  """
  (keys, values), layer = as_stack((keys, values), layer)
  attend = functools.partial(
    dispatch,
    _PROGRAMS,
    spread=("B", "LB", "LB", "B", "B", "B", ""),
    result="B",
    kv_heads=kv_heads,
    options=options,
    span=span,
  )
  partial: Partial = on_mesh(
    lambda *operands: attend(operands),
    (queries, keys, values, query_positions, key_positions, heads, layer),
    # All heads, each of which has pages on any device.
    ("B", "LBR", "LBR", "B", "BR", "BR", ""),
    "B",
    merge_devices,
  )
  return partial
