"""Pools of pages: layers are read in them, and meshes share them out."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params

import kvjax
from kvjax import kernels
from kvjax.cache.layers import LayerCache
from kvjax.cache.packed import PAGE, PackedLayer
from kvjax.cache.pooled import PooledLayers
from kvjax.cache.sharding import parse_mesh, shard_stack, split_mesh
from kvjax.engine.decode import DecodingInputs, decode
from kvjax.kernels.compiled.collectives import collectives
from kvjax.kernels.compiled.hlo import Module
from kvjax.struct import replace
from kvjax.testing import TinyModel, kept_positions, random_activations

SPEC = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8)
MODEL = TinyModel(kvjax.Geometry((SPEC,) * 3, 4096))
REQUEST = kvjax.RepeatRequest((3, 1, 4), (11, 12), (13, 14, 15), (9, 2))
LENGTHS = (600, 410, 333, 590)
NEW = 6


def prompts_of():
  draw = np.random.default_rng(7)
  rows = [draw.integers(5, 64, length).tolist() for length in LENGTHS]
  return kvjax.Prompts.of(rows, repeat_request=REQUEST)


PLAN = kvjax.get_plan("kvzip:chunk=256", kvjax.Retention(0.3))
# What is asked of the caches.
QUESTIONS = kvjax.Prompts.of([[5, 9], [2], [11, 4, 8], [7]])


def compressed():
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), prompts_of(), PLAN)
  (pool,) = cache.stacks
  assert isinstance(pool, PooledLayers)
  return cache


def answers(cache):
  return kvjax.generate(
    MODEL, MODEL.init(), cache, QUESTIONS, kvjax.Decoding(NEW)
  ).tokens


@functools.cache
def alone():
  """A cache on one device, and what it answers."""
  cache = compressed()
  return cache, answers(cache)


def mesh_of(axes):
  """A mesh whose KV heads divide."""
  return split_mesh(parse_mesh(axes), SPEC.kv_heads)


@pytest.mark.parametrize(
  "axes", ["model:4", "data:2,model:2", "model:3", "context:2,model:2"]
)
def test_each_device_has_its_share_of_the_pages_of_every_layer(axes):
  expected, said = alone()
  with jax.set_mesh(mesh_of(axes)):
    cache = compressed()
    np.testing.assert_array_equal(answers(cache), said)
  for row in range(len(LENGTHS)):
    assert kept_positions(cache, row) == kept_positions(expected, row)
  (pool,) = cache.stacks
  devices = pool.devices
  assert devices == {"data:2,model:2": 2, "model:3": 3}.get(axes, 4)
  keys = pool.pages.keys
  share = keys.sharding.shard_shape(keys.shape)[2]
  assert share * devices == keys.shape[2]
  # A device has as many used pages as any other, or one less for each layer.
  used = np.asarray(pool.pages.heads).reshape(4, devices, share) >= 0
  by_device = used.sum(axis=2)
  assert np.all(np.ptp(by_device, axis=1) <= 3)
  assert by_device.sum() * PAGE >= sum(
    len(head)
    for row in range(4)
    for layer in kept_positions(cache, row)
    for head in layer
  )


def test_a_small_pool_of_uneven_layers_is_joined_with_a_large_one():
  row = np.random.default_rng(0).integers(0, 64, 200).tolist()
  prompts = kvjax.Prompts.of([row], repeat_request=REQUEST)
  model = TinyModel()
  params = model.init()
  names = ("simlayerkv:recent=6", 0.55), ("kvzip:chunk=64", 0.6)
  plans = [kvjax.get_plan(name, share) for name, share in names]
  caches, _ = kvjax.sweep(model, params, prompts, plans)
  small, large = (cache.stacks[0] for cache in caches)
  assert small.pages.heads.size < large.pages.heads.size
  assert small.most > large.most
  for joined in (caches, caches[::-1]):
    stacked = kvjax.stack(joined)
    for row, cache in enumerate(joined):
      assert kept_positions(stacked, row) == kept_positions(cache, 0)


def test_decoding_moves_no_pages():
  mesh = mesh_of("model:4")
  with jax.set_mesh(mesh):
    cache = kvjax.reserve(compressed(), NEW)

    def loop(params, cache, logits):
      run = DecodingInputs(jnp.arange(4), None, None, jnp.int32(NEW))
      return decode(MODEL, params, cache, logits, kvjax.Decoding(NEW), run)

    logits = jnp.zeros((4, MODEL.vocab_size))
    compiled = jax.jit(loop).lower(MODEL.init(), cache, logits).compile()
  found = collectives(Module.of(compiled.as_text()), turn=True)
  assert found
  one_page_a_row = len(LENGTHS) * PAGE * SPEC.key_dim * 4
  assert max(each.largest for each in found) < one_page_a_row


LAYERS, SHARE, MOST, WIDTH = 6, 40, 48, 128


def pool_of(dtype, rows=1, kv_dtype=None):
  """Shapes of a pool of pages that its layers share evenly, and of a token."""
  seen = random_activations(
    0, [1] * rows, 1, heads=4, kv_heads=2, head_dim=WIDTH
  )
  seen = jax.tree.map(
    lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, seen
  )

  def make(seen):
    slots = jnp.zeros((rows, 2, 1), jnp.int32)
    layer = PackedLayer.of(LayerCache.of(seen), slots, 2)
    layer = layer.quantize(kv_dtype) if kv_dtype else layer
    extra = MOST - layer.pages.heads.shape[1]
    layer = replace(layer, pages=layer.pages.grow(extra, 1))
    part = PooledLayers.empty(layer, SHARE)
    stack = jax.tree.map(lambda x: jnp.stack([x] * LAYERS), part)
    return shard_stack(stack).grow(32)

  return jax.eval_shape(make, seen), jax.eval_shape(lambda: seen)


def test_a_step_copies_one_layer_once_on_a_cpu():
  """A CPU's products cannot read a part of an array.

  What a layer may have is cut out of the pool, which reads and writes it, and
  multiplied. Of several rows, XLA counts the whole pool.
  """
  pool, seen = pool_of("float32")
  step = jax.jit(PooledLayers.step, donate_argnums=0)
  compiled = step.lower(pool, seen, jnp.int32(2)).compile()
  layer = MOST * PAGE * 2 * WIDTH * 4
  assert compiled.cost_analysis()["bytes accessed"] < 3.4 * layer
  assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * layer


def made_by(jaxpr):
  """Operations of a program outside of kernels, and the sizes of results."""
  for equation in jaxpr.eqns:
    if equation.primitive.name not in ("pallas_call", "core_map", "mpmd_map"):
      for part in jaxprs_in_params(equation.params):
        yield from made_by(part)
    for made in equation.outvars:
      yield equation.primitive.name, made.aval.size


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernels_read_pages_where_they_lie(platform, kv_dtype):
  """Nothing as large as a layer's keys is made but views of the pool."""
  pool, seen = pool_of("bfloat16", rows=2, kv_dtype=kv_dtype)
  # Where the kernel declines, this raises an error.
  with kernels.use("pallas", platform):
    program = jax.make_jaxpr(PooledLayers.step)(pool, seen, jnp.int32(2))
  layer = 2 * MOST * PAGE * WIDTH
  large = {name for name, size in made_by(program.jaxpr) if size >= layer}
  assert large <= {"reshape", "broadcast_in_dim"}  # which adds an axis


@pytest.mark.parametrize(
  "axes", ["", pytest.param("model:2", marks=pytest.mark.slow)]
)
def test_kernels_answer_what_xla_answers(axes):
  expected, said = alone()
  with contextlib.ExitStack() as contexts:
    if axes:
      contexts.enter_context(jax.set_mesh(mesh_of(axes)))
    cache = compressed() if axes else expected
    contexts.enter_context(
      pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())
    )
    contexts.enter_context(kernels.use(platform="tpu"))
    np.testing.assert_array_equal(answers(cache), said)


@pytest.mark.parametrize("axes", ["", "model:2", "data:4"])
def test_a_pool_goes_on_under_another_mesh(axes, tmp_path):
  with jax.set_mesh(mesh_of("model:4")):
    kvjax.save_cache(compressed(), tmp_path, model=MODEL, model_id="tiny")
  context = jax.set_mesh(mesh_of(axes)) if axes else contextlib.nullcontext()
  expected, said = alone()
  with context:
    cache = kvjax.load_cache(tmp_path, model=MODEL, model_id="tiny")
    np.testing.assert_array_equal(answers(cache), said)
  for row in range(len(LENGTHS)):
    assert kept_positions(cache, row) == kept_positions(expected, row)


@pytest.mark.parametrize("axes", ["", "model:4"])
def test_files_with_pages_by_layer_are_read(axes, tmp_path):
  """Older files have a slab of pages per layer, which pools fill in turn."""
  expected, said = alone()
  with jax.set_mesh(mesh_of("model:4")):
    cache = compressed()
    (pool,) = cache.stacks

    def by_layer(x):
      parts = x.reshape(x.shape[1], pool.devices, 3, -1, *x.shape[3:])
      slabs = jnp.moveaxis(parts, 2, 0)
      return slabs.reshape(3, x.shape[1], -1, *x.shape[3:])

    older = replace(pool, pages=jax.tree.map(by_layer, pool.pages))
    older = dataclasses.replace(cache, stacks=(older,))
    kvjax.save_cache(older, tmp_path, model=MODEL, model_id="tiny")
  context = jax.set_mesh(mesh_of(axes)) if axes else contextlib.nullcontext()
  with context:
    loaded = kvjax.load_cache(tmp_path, model=MODEL, model_id="tiny")
    np.testing.assert_array_equal(answers(loaded), said)
  for ours, theirs in zip(
    *map(jax.tree.leaves, (loaded.stacks, cache.stacks)), strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)
  for row in range(len(LENGTHS)):
    assert kept_positions(loaded, row) == kept_positions(expected, row)
