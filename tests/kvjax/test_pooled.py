"""Pools of pages on meshes: each device has its share of every layer."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.packed import PAGE
from kvjax.cache.pooled import PooledLayers
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.engine.decode import DecodingInputs, decode
from kvjax.kernels.compiled.collectives import collectives
from kvjax.kernels.compiled.hlo import Module
from kvjax.testing import TinyModel, kept_positions

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
  used = np.asarray(pool.pages.heads).reshape(3, 4, devices, share) >= 0
  by_device = used.sum(axis=(0, 3))
  assert np.all(np.ptp(by_device, axis=1) <= 3)
  assert by_device.sum() * PAGE >= sum(
    len(head)
    for row in range(4)
    for layer in kept_positions(cache, row)
    for head in layer
  )


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
