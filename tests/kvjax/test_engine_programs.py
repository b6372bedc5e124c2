"""How many programs prefill takes, and how large they are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from kvjax.engine.decoding import Run
from kvjax.engine.one_pass import one_pass

import kvjax
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache, tree_bytes
from kvjax.engine import answering
from kvjax.engine.plans import Kept, Room
from kvjax.methods import FullKV, KeyDiff
from kvjax.prompts import bucket, bucket_lengths
from kvjax.testing import TinyModel


def test_buckets_are_few_and_near():
  sizes = [bucket(n) for n in range(1, 5000)]
  assert all(
    n <= size <= max(32, 3 * n // 2) for n, size in enumerate(sizes, start=1)
  )
  assert len(set(sizes)) < 18
  assert all(n in bucket_lengths(bucket(n)) for n in range(33, 5000))


def test_a_layers_full_cache_does_not_outlive_the_layer():
  """Peak memory of a compiled prefill, against the full cache of all layers."""
  geometry = dataclasses.replace(TinyModel().geometry, layers=8, head_dim=32)
  model = TinyModel(geometry)
  params = jax.eval_shape(model.init)
  length, budget = 2048, 128

  def memory(method, budget):
    counts = jax.ShapeDtypeStruct((8, 1), "int32")
    lowered = one_pass.lower(
      model,
      params,
      jax.ShapeDtypeStruct((1, length), "int32"),
      jax.ShapeDtypeStruct((1,), "int32"),
      [Kept(counts, counts)],
      [None],
      None,
      plans=(kvjax.Plan(method, kvjax.Tokens(budget)),),
      rooms=((Room(budget, budget == length),) * 8,),
      most_reads=(0,),
    )
    used = lowered.compile().memory_analysis()
    return used.temp_size_in_bytes, used.output_size_in_bytes

  slot = 2 * 4 * geometry.head_dim + 4
  full_layer = geometry.kv_heads * length * slot
  temporary, output = memory(KeyDiff(), budget)
  small_layer = geometry.kv_heads * budget * slot
  assert 8 * small_layer < output < 8 * small_layer + 4096
  full_temporary, full_output = memory(FullKV(), length)
  assert full_output > 8 * full_layer
  # Peak falls by nearly the caches of the layers that are already done.
  saved = full_temporary + full_output - temporary - output
  assert saved > 5 * (full_layer - small_layer)


def test_tokens_are_written_into_the_cache_that_is_given():
  """A turn's temporaries are a layer's, whatever the number of layers."""
  geometry = dataclasses.replace(TinyModel().geometry, layers=4, head_dim=32)
  model, rows, slots = TinyModel(geometry), 2, 4096
  numbers = functools.partial(jax.ShapeDtypeStruct, dtype="int32")
  place = rows, geometry.kv_heads, slots

  def empty():
    values = jnp.zeros((*place, 32))
    positions = jnp.full(place, -1, "int32")
    layer = LayerCache(values, values, positions, jnp.int32(0))
    return Cache((layer,) * geometry.layers, jnp.zeros(rows, "int32"))

  cache = jax.eval_shape(empty)
  program = answering._converse.lower(
    model,
    jax.eval_shape(model.init),
    cache,
    numbers((rows, 8)),
    numbers((rows,)),
    jax.eval_shape(lambda: Run(jnp.zeros(rows, "int32"), None, None)),
    decoding=kvjax.Decoding(20),
  )
  used = program.compile().memory_analysis()
  assert used.alias_size_in_bytes >= tree_bytes(cache)
  # Values without what empty slots hold, in the turn and in decoding.
  assert used.temp_size_in_bytes < 2.1 * tree_bytes(cache.layers[0].values)
