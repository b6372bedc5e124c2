"""Bytes that the kernels of a traced program move, block by block."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from made_up_kernel import twice

from kvjax import kernels
from kvjax.kernels.compiled.kernel_traffic import KernelTraffic, kernels_in
from kvjax.kernels.sparse_decode import sparse_decode


def test_blocks_count_when_they_change():
  traced = jax.jit(lambda x: jax.lax.cond(True, twice, twice, x)).trace(
    jax.ShapeDtypeStruct((2, 8, 128), jnp.float32)
  )
  found = list(kernels_in(traced.jaxpr))
  block = 8 * 128 * 4
  one = KernelTraffic("twice", ((2, 32, 128),), (2 * block,), (8 * block,))
  assert found == [one, one]


@pytest.mark.parametrize(
  ("cost", "decided"),
  # All of the blocks and of the array, or their part of what is left for both.
  [(None, (3 * 64, 4096)), (288 + 64 + 67, (3, 64))],
)
def test_blocks_that_data_choose_and_copies_of_the_kernel(cost, decided):
  def body(chosen, blocked, whole, out):
    del chosen, whole
    out[...] = blocked[...]

  estimate = cost and pl.CostEstimate(
    flops=0, transcendentals=0, bytes_accessed=cost
  )
  spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=1,
    grid=(3,),
    in_specs=[
      pl.BlockSpec((1, 16), lambda i, chosen: (chosen[i], 0)),
      pl.BlockSpec(memory_space=pl.ANY),
    ],
    out_specs=pl.BlockSpec((1, 16), lambda i, chosen: (0 * i, 0)),
  )
  call = pl.pallas_call(
    body,
    grid_spec=spec,
    out_shape=jax.ShapeDtypeStruct((1, 16), jnp.float32),
    cost_estimate=estimate,
    name="chosen",
  )
  traced = jax.jit(call).trace(
    jax.ShapeDtypeStruct((72,), jnp.int32),
    jax.ShapeDtypeStruct((9, 16), jnp.float32),
    jax.ShapeDtypeStruct((1024,), jnp.float32),
  )
  (found,) = kernels_in(traced.jaxpr)
  assert found.read == (72 * 4, *decided)
  assert found.written == (64,)


@pytest.mark.parametrize(
  ("length", "page", "rows_copied"),
  # A word has two rows of bfloat16; pages are whole words.
  [(512, 1, 2), (4096, 1, 2), (4096, 16, 1)],
)
def test_of_a_cache_the_listed_rows_count_with_their_words(
  length, page, rows_copied
):
  lists, most, dim = 2, 256, 128
  shape = jax.ShapeDtypeStruct((1, 1, lists, length, dim), jnp.bfloat16)
  with kernels.use("pallas", "tpu"):
    traced = jax.jit(functools.partial(sparse_decode, page=page)).trace(
      jax.ShapeDtypeStruct((1, 4 * lists, dim), jnp.bfloat16),
      shape,
      shape,
      jax.ShapeDtypeStruct((1, lists, most), jnp.int32),
      layer=jax.ShapeDtypeStruct((), jnp.int32),
    )
  (found,) = kernels_in(traced.jaxpr)
  keys_and_values = 2
  row = dim * jnp.dtype(jnp.bfloat16).itemsize
  # Other arrays are read in blocks that nobody chooses.
  assert (
    sorted(found.read)[-2:]
    == [keys_and_values * rows_copied * lists * most * row // 2] * 2
  )
