"""What caches in eight bits take, at rest and while they are worked with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from kvjax.engine.decoding import feed
from kvjax.engine.one_pass import one_pass

import kvjax
from kvjax.cache.layers import tree_bytes
from kvjax.engine.plans import Kept, Plan, Room
from kvjax.methods import FullKV, get_method
from kvjax.testing import TinyModel

GEOMETRY = kvjax.Geometry(
  layers=1, heads=4, kv_heads=2, head_dim=64, max_positions=2**15
)
DENSE, PACKED = "snapkv:window=8", "ada/snapkv:window=8"


def plan(name, storage, tokens=20):
  return Plan(get_method(name), kvjax.Tokens(tokens), storage=storage)


def lowered(model, plan, length, room):
  """The compiled prefill of one row, of which each head keeps `room`."""
  counts = jax.ShapeDtypeStruct((model.geometry.layers, 1), "int32")
  return one_pass.lower(
    model,
    jax.eval_shape(model.init),
    jax.ShapeDtypeStruct((1, length), "int32"),
    jax.ShapeDtypeStruct((1,), "int32"),
    [Kept(counts, counts)],
    [None],
    None,
    plans=(plan,),
    rooms=((room,) * model.geometry.layers,),
    most_reads=(0,),
  )


@pytest.mark.parametrize(
  ("method", "dtype"), [(DENSE, "bfloat16"), (PACKED, "float32")]
)
def test_bytes_are_those_of_small_numbers_and_their_scales(method, dtype):
  geometry = dataclasses.replace(GEOMETRY, head_dim=128)
  model = TinyModel(geometry, dtype=dtype)
  size = jnp.dtype(dtype).itemsize
  used = {}
  for storage in (None, "int8", "fp8"):
    program = lowered(model, plan(method, storage), 64, Room(20, False))
    (cache,) = program.out_info.caches
    each = 2 * 128 * size if storage is None else 2 * (128 + 4)
    slots, more = 2 * 20, 2 * 4  # cursor and next position
    if method == PACKED:
      pages = (2 * 20 + 2 * 31) // 32
      slots, more = pages * 32, more + pages * 4
    used[storage] = tree_bytes(cache)
    assert used[storage] == slots * (each + 4) + more
  assert used["fp8"] == used["int8"]
  assert used["int8"] / used[None] == pytest.approx(1 / size, abs=0.03)


@pytest.mark.parametrize("method", [DENSE, PACKED])
def test_a_decoded_token_makes_no_cache_of_floats(method):
  model, slots = TinyModel(GEOMETRY), 2**14
  own = plan(method, "int8", slots)
  program = lowered(model, own, slots + 1, Room(slots, False))
  (cache,) = program.out_info.caches
  shape = functools.partial(jax.ShapeDtypeStruct, dtype="int32")
  cache = jax.eval_shape(
    lambda cache: kvjax.reserve(cache, 8),
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cache),
  )
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
  """Peak memory falls by what the floats of the layers that are done take."""
  geometry = dataclasses.replace(GEOMETRY, layers=4, head_dim=32)
  model, length = TinyModel(geometry), 2048

  def memory(storage):
    own = Plan(FullKV(), kvjax.Tokens(length), storage=storage)
    used = lowered(model, own, length, Room(length, True)).compile()
    used = used.memory_analysis()
    return used.temp_size_in_bytes + used.output_size_in_bytes

  spared = 2 * length * 2 * (4 * 32 - 32 - 4)  # per layer
  assert memory(None) - memory("int8") > 2 * spared
