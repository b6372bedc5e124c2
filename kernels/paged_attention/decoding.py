"""Attention of one token to a cache whose heads have equally many slots."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.chunked import attention_chunked
from kvjax.kernels.attention.options import AttentionOptions
from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.dispatch import dispatch
from kvjax.kernels.programs import Programs
from kvjax.kernels.quantized import Quantized


def decode_attention(
  queries: Float[Array, "B N 1 D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B 1"],
  key_positions: Int[Array, "B K T"],
  options: AttentionOptions,
  layer: Int[Array, ""],
) -> Partial:
  """Computes `kvjax.kernels.attention.partial_attention` for one token.

  On GPUs, XLA copies the layer out of the stack before it multiplies. The
  kernel for pages reads it in place: every head is one page.
  """
  partial: Partial = dispatch(
    _PROGRAMS,
    (queries, keys, values, query_positions, key_positions, layer),
    ("BN", "LBK", "LBK", "B", "BK", ""),
    "BN",
    options=options,
  )
  return partial


def decode_attention_xla(
  queries: Float[Array, "B N 1 D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B 1"],
  key_positions: Int[Array, "B K T"],
  layer: Int[Array, ""],
  options: AttentionOptions,
) -> Partial:
  """XLA version of `decode_attention`."""
  return attention_chunked(
    queries, keys, values, query_positions, key_positions, options, layer
  )


def decode_attention_gpu(
  queries: Float[Array, "B N 1 D"],
  keys: Float[Array, "L B K T D"] | Quantized,
  values: Float[Array, "L B K T Dv"] | Quantized,
  query_positions: Int[Array, "B 1"],
  key_positions: Int[Array, "B K T"],
  layer: Int[Array, ""],
  options: AttentionOptions,
) -> Partial:
  """Kernel for `decode_attention`.

  Raises:
    NotImplementedError: see `paged_attention_gpu`; windows are served.
  """
  # Pallas takes longer to import than the rest of kvjax.
  from kvjax.kernels.paged_attention.gpu import paged_attention_gpu

  visible = options.visible(query_positions[..., None], key_positions)
  batch, kv_heads, _ = key_positions.shape
  return paged_attention_gpu(
    queries,
    keys,
    values,
    query_positions,
    jnp.where(visible, key_positions, -1),
    jnp.broadcast_to(jnp.arange(kv_heads)[None], (batch, kv_heads)),
    layer,
    kv_heads,
    dataclasses.replace(options, window=None),
  )


# TPUs read stacks in place by XLA's program.
_PROGRAMS = Programs(decode_attention_xla, None, decode_attention_gpu)
