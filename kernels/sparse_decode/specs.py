"""Benchmark shapes: lists of retrieved slots of the cache of Llama-3.1-8B.

That of Llama-3.2-1B differs only in the width of the heads.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.kernels.attention.partial import Partial
from kvjax.kernels.quantized import Quantized, quantize
from kvjax.kernels.sparse_decode.api import sparse_decode
from kvjax.kernels.specs import Choices, Spec

_HEADS, _KV_HEADS = 32, 8


def _decoding(
  batch: int,
  length: int,
  lists: int,
  num_slots: int,
  bits: int = 16,
  dim: int = 128,
  page: int = 1,
) -> Spec:
  """Decoding with one list of random pages per KV head or query head."""

  def arrays(key: Array) -> tuple[Array, ...]:
    drawn = jax.random.split(key, 4)
    shape = (batch, _KV_HEADS, length, dim)
    queries = jax.random.normal(drawn[0], (batch, _HEADS, dim), jnp.bfloat16)
    keys = jax.random.normal(drawn[1], shape, jnp.bfloat16)
    values = jax.random.normal(drawn[2], shape, jnp.bfloat16)
    # A list has one page from each of as many equal parts of the cache.
    pages, part = num_slots // page, length // num_slots
    first = jax.random.randint(drawn[3], (batch, lists, pages), 0, part)
    first = first + jnp.arange(pages, dtype=jnp.int32)[None, None] * part
    within = jnp.arange(page, dtype=jnp.int32)[None, None, None]
    slots = first[..., None] * page + within
    slots = slots.reshape(batch, lists, num_slots)
    if bits == 8:
      quantized = (quantize(x, jnp.int8) for x in (keys, values))
      return queries, *itertools.chain(*quantized), slots
    return queries, keys, values, slots

  per_slot = 2 * dim * bits // 8 + (8 if bits == 8 else 0) + 4
  pages = f" in pages of {page}" if page > 1 else ""
  return Spec(
    f"{batch} x {lists} lists of {num_slots:,} of {length:,} slots{pages}, "
    f"{dim} times {bits} bits",
    functools.partial(sparse_decode, page=page)
    if bits == 16
    else _of_eight_bits,
    arrays,
    batch * lists * num_slots * per_slot + 4 * batch * _HEADS * dim,
    platforms=("tpu",),
  )


def _of_eight_bits(
  queries: Array,
  keys: Array,
  key_scales: Array,
  values: Array,
  value_scales: Array,
  slots: Array,
) -> Partial:
  quantized = Quantized(keys, key_scales), Quantized(values, value_scales)
  return sparse_decode(queries, *quantized, slots)


SPECS = (
  _decoding(1, 131_072, _KV_HEADS, 4096),
  _decoding(4, 32_768, _KV_HEADS, 1024),
  _decoding(1, 32_768, _HEADS, 512),
  _decoding(1, 32_768, _HEADS, 512, page=16),
  _decoding(1, 131_072, _KV_HEADS, 4096, bits=8),
  _decoding(1, 131_072, _KV_HEADS, 4096, dim=64),
)

CHOICES = (
  Choices(
    "sparse_decode/tpu",
    {"chunk": (128, 256, 512), "unroll": (4, 8, 16)},
    SPECS[0],
  ),
)
