"""Benchmark shapes: packed caches of Llama-3.1-8B with a quarter of the tokens.

Those of Llama-3.2-1B differ only in the width of the heads.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.paged_attention.api import paged_attention
from kvjax.kernels.quantized import Quantized, quantize
from kvjax.kernels.specs import Choices, Spec

_HEADS, _KV_HEADS, _PAGE = 32, 8, 32


def _decoding(batch: int, length: int, bits: int, dim: int = 128) -> Spec:
  """Decoding of one token; head j has 2 j + 1 of 64 parts of the pages."""
  pages = length // 4 // _PAGE * _KV_HEADS

  def arrays(key: Array) -> tuple[Array, ...]:
    drawn = jax.random.split(key, 3)
    shape = (batch, pages, _PAGE, dim)
    queries = jax.random.normal(drawn[0], (batch, _HEADS, 1, dim), jnp.bfloat16)
    keys = jax.random.normal(drawn[1], shape, jnp.bfloat16)
    values = jax.random.normal(drawn[2], shape, jnp.bfloat16)
    number = jnp.arange(pages, dtype=jnp.int32)
    heads = jnp.sqrt(number.astype(jnp.float32) / pages) * _KV_HEADS
    heads = jnp.broadcast_to(heads.astype(jnp.int32)[None], (batch, pages))
    positions = jnp.arange(pages * _PAGE, dtype=jnp.int32) % length
    positions = jnp.broadcast_to(positions.reshape(1, pages, _PAGE), shape[:-1])
    last = jnp.full((batch, 1), length, jnp.int32)
    if bits == 8:
      quantized = (quantize(x, jnp.int8) for x in (keys, values))
      return queries, *itertools.chain(*quantized), last, positions, heads
    return queries, keys, values, last, positions, heads

  per_slot = 2 * dim * bits // 8 + (8 if bits == 8 else 0) + 4
  return Spec(
    f"{batch} x {pages:,} pages of {_PAGE}, {dim} times {bits} bits",
    _of_sixteen_bits if bits == 16 else _of_eight_bits,
    arrays,
    batch * pages * (_PAGE * per_slot + 4) + 4 * batch * _HEADS * dim,
  )


_of_sixteen_bits = functools.partial(paged_attention, kv_heads=_KV_HEADS)


def _of_eight_bits(
  queries: Array,
  keys: Array,
  key_scales: Array,
  values: Array,
  value_scales: Array,
  *positions: Array,
) -> Partial:
  quantized = Quantized(keys, key_scales), Quantized(values, value_scales)
  return _of_sixteen_bits(queries, *quantized, *positions)


SPECS = (
  _decoding(1, 131_072, 16),
  _decoding(4, 32_768, 16),
  _decoding(4, 32_768, 8),
  _decoding(1, 131_072, 16, dim=64),
)

CHOICES = (
  Choices("paged_attention/gpu", {"blocks": (132, 264, 528)}, SPECS[0]),
  # Longer blocks of wide float32 heads do not fit into VMEM.
  Choices("paged_attention/tpu", {"block": (512, 1024, 2048)}, SPECS[0]),
)
