"""Lists of slots, as retrieval names them, of the cache of Llama-3.1-8B.

That of Llama-3.2-1B differs in the width of its heads alone.
"""

import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.quantized import Quantized, quantize
from kvjax.kernels.sparse_decode.api import sparse_decode
from kvjax.kernels.specs import Spec

_HEADS, _KV_HEADS = 32, 8


def _decoding(
  batch: int, length: int, lists: int, most: int, bits: int, dim: int = 128
) -> Spec:
  """A list for every KV head or every query head, at random slots."""

  def arrays(key: Array) -> tuple[Array, ...]:
    drawn = jax.random.split(key, 4)
    shape = (batch, _KV_HEADS, length, dim)
    queries = jax.random.normal(drawn[0], (batch, _HEADS, dim), jnp.bfloat16)
    keys = jax.random.normal(drawn[1], shape, jnp.bfloat16)
    values = jax.random.normal(drawn[2], shape, jnp.bfloat16)
    # Every list has one slot of each of as many equal parts of the cache.
    part = length // most
    slots = jax.random.randint(drawn[3], (batch, lists, most), 0, part)
    slots = slots + jnp.arange(most, dtype=jnp.int32)[None, None] * part
    if bits == 8:
      small = (quantize(x, jnp.int8) for x in (keys, values))
      return queries, *itertools.chain(*small), slots
    return queries, keys, values, slots

  per_slot = 2 * dim * bits // 8 + (8 if bits == 8 else 0) + 4
  return Spec(
    f"{batch} x {lists} lists of {most:,} of {length:,} slots, "
    f"{dim} times {bits} bits",
    sparse_decode if bits == 16 else _of_eight_bits,
    arrays,
    batch * lists * most * per_slot + 4 * batch * _HEADS * dim,
  )


def _of_eight_bits(
  queries: Array,
  keys: Array,
  key_scales: Array,
  values: Array,
  value_scales: Array,
  slots: Array,
) -> Partial:
  small = Quantized(keys, key_scales), Quantized(values, value_scales)
  return sparse_decode(queries, *small, slots)


SPECS = (
  _decoding(1, 131_072, _KV_HEADS, 4096, 16),
  _decoding(4, 32_768, _KV_HEADS, 1024, 16),
  _decoding(1, 32_768, _HEADS, 512, 16),
  _decoding(1, 131_072, _KV_HEADS, 4096, 8),
  _decoding(1, 131_072, _KV_HEADS, 4096, 16, dim=64),
)
