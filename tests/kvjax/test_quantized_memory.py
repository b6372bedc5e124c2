"""What caches in eight bits take, at rest and while they are worked with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.engine.compress import LayerInputs, compress_layer, keep_layer
from kvjax.engine.feed import feed
from kvjax.engine.prepared import LayerProgram
from kvjax.struct import tree_bytes
from kvjax.testing import TinyModel, random_activations

DENSE, PACKED = "snapkv:window=8", "ada/snapkv:window=8"


def tiny(head_dim, dtype="float32"):
  geometry = kvjax.Geometry.uniform(1, 4, 2, head_dim, 2**15)
  return TinyModel(geometry, dtype=dtype)


def cache_of(model, name, kv_dtype, length, tokens):
  """Shapes of what is kept of a row of one layer."""
  plan = kvjax.get_plan(name, kvjax.Tokens(tokens), kv_dtype=kv_dtype)
  prompts = kvjax.Prompts.of([[1] * length], length)
  cache, _ = jax.eval_shape(
    lambda: kvjax.prefill(model, model.init(), prompts, plan)
  )
  return cache


@pytest.mark.parametrize(
  ("method", "dtype"), [(DENSE, "bfloat16"), (PACKED, "float32")]
)
def test_bytes_are_those_of_small_numbers_and_their_scales(method, dtype):
  size = jnp.dtype(dtype).itemsize
  used = {}
  for kv_dtype in (None, "int8", "fp8"):
    cache = cache_of(tiny(128, dtype), method, kv_dtype, 64, 20)
    each = 2 * 128 * size if kv_dtype is None else 2 * (128 + 4)
    slots, more = 2 * 20, 2 * 4  # cursor and next position
    if method == PACKED:
      pages = (2 * 20 + 2 * 31) // 32
      slots, more = pages * 32, more + pages * 4
    used[kv_dtype] = tree_bytes(cache)
    assert used[kv_dtype] == slots * (each + 4) + more
  assert used["fp8"] == used["int8"]
  assert used["int8"] / used[None] == pytest.approx(1 / size, abs=0.03)


@pytest.mark.parametrize("method", [DENSE, PACKED])
def test_a_decoded_token_makes_no_cache_of_floats(method):
  model, slots = tiny(64), 2**14
  cache = cache_of(model, method, "int8", slots + 1, slots)
  shape = functools.partial(jax.ShapeDtypeStruct, dtype="int32")
  cache = jax.eval_shape(lambda cache: kvjax.reserve(cache, 8), cache)
  params = jax.eval_shape(model.init)
  step = jax.jit(feed, static_argnums=0, donate_argnums=2)
  used = step.lower(model, params, cache, shape((1, 1)), shape((1,)))
  used = used.compile().memory_analysis()
  keys = 2 * slots * 64 * 4
  assert tree_bytes(cache) < 2 * keys / 3
  # Of 4096 slots or pages of as many, keys and values, and their products.
  assert used.temp_size_in_bytes < 0.75 * keys
  assert used.alias_size_in_bytes >= tree_bytes(cache) - 64


def test_a_prefill_holds_no_layer_longer_because_it_is_rounded():
  """Layers that are done stay in eight bits while another one is rounded."""
  model, length, layers = tiny(32), 2048, 4
  activations = jax.eval_shape(
    lambda: random_activations(0, [length], length, head_dim=32).only(())
  )
  kept = LayerInputs(
    jax.ShapeDtypeStruct((), "int32"), activations, None, None, None
  )

  def memory(kv_dtype):
    program = LayerProgram(length, kv_dtype=kv_dtype)
    layer = jax.eval_shape(
      functools.partial(compress_layer, model, program), kept
    )
    stack = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype), layer
    )
    used = keep_layer.lower(
      stack,
      jax.ShapeDtypeStruct((), "int32"),
      kept,
      model=model,
      program=program,
    )
    used = used.compile().memory_analysis()
    # What is held before stays where it is.
    assert used.alias_size_in_bytes >= tree_bytes(stack) - 64
    assert used.output_size_in_bytes <= tree_bytes(stack) + 512
    return used.output_size_in_bytes, used.temp_size_in_bytes

  slots = 2 * length
  plain, _ = memory(None)
  rounded, beside = memory("int8")
  assert plain - rounded > 0.99 * layers * slots * 2 * (4 * 32 - 32 - 4)
  # The layer's own floats at most, before it is written.
  assert beside < 1.1 * slots * 2 * 32 * 4


@pytest.mark.parametrize(
  ("kv_dtype", "small"), [("int8", jnp.int8), ("fp8", jnp.float8_e4m3fn)]
)
def test_layers_with_a_window_stay_in_their_dtype(kv_dtype, small):
  (spec,) = tiny(16).geometry.layers
  local = dataclasses.replace(spec, window=8)
  model = TinyModel(kvjax.Geometry((local, spec), 4096))
  plan = kvjax.get_plan(DENSE, kvjax.Tokens(20), kv_dtype=kv_dtype)
  prompts = kvjax.Prompts.of([[*range(64)]])
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  window, compressed = cache.layers
  assert window.keys.dtype == window.values.dtype == jnp.float32
  assert compressed.keys.qvalue.dtype == small
