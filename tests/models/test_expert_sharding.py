"""Experts of which each device of a mesh has a part."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.kernels.compiled.collectives import collectives
from kvjax.kernels.compiled.hlo import Module
from kvjax.models import experts
from kvjax.models.structure import ExpertSizes

ROWS, WIDTH, PER_TOKEN = 2, 12, 3


@pytest.fixture(scope="module")
def mlp():
  """Its function of weights and inputs, and the weights, biases included."""
  sizes = ExpertSizes(8, PER_TOKEN, 16, normalized=True, bias=True)
  module = experts.SparseMlp(sizes, WIDTH, "clipped", jnp.float32, nnx.Rngs(0))
  graph, state = nnx.split(module)
  keys = iter(jax.random.split(jax.random.key(1), 100))
  state = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), state)

  def call(state, x):
    return nnx.merge(graph, state)(x)

  return call, state


@pytest.fixture
def grouped(monkeypatch):
  """Computes as TPUs do."""
  monkeypatch.setattr(experts, "target_platform", lambda: "tpu")


def inputs(length):
  return jax.random.normal(jax.random.key(2), (ROWS, length, WIDTH))


def slope(call):
  return jax.grad(lambda *given: jnp.sum(jnp.sin(call(*given))), (0, 1))


@pytest.mark.parametrize("length", [8, 1])
def test_devices_in_groups_compute_as_one(mlp, monkeypatch, length):
  """Their KV heads are shared by two, and the experts by all four."""
  call, state = mlp
  x = inputs(length)[:1]
  expected = call(state, x)
  monkeypatch.setattr(experts, "target_platform", lambda: "tpu")
  with jax.set_mesh(split_mesh(parse_mesh("model:4"), kv_heads=2)):
    found = jax.jit(call)(state, x)
  assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  parts = {shard.data.shape[1] for shard in found.addressable_shards}
  assert parts == {2 if length == 8 else 1}


@pytest.mark.parametrize(
  "mesh",
  ["model:4", "data:2,model:2", "context:2,model:2", "model:3", "data:2"],
)
@pytest.mark.parametrize("length", [8, 7, 1])
@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_devices_compute_as_one(mlp, monkeypatch, mesh, length, platform):
  """One computes blocks of rows, as CPUs do; 7 tokens do not divide."""
  call, state = mlp
  x = inputs(length)
  expected = call(state, x)
  slopes = slope(call)(state, x)
  monkeypatch.setattr(experts, "target_platform", lambda: platform)
  with jax.set_mesh(parse_mesh(mesh)):
    assert_allclose(jax.jit(call)(state, x), expected, rtol=1e-4, atol=1e-4)
    found = jax.jit(slope(call))(state, x)
  jax.tree.map(
    lambda a, b: assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, slopes
  )


@pytest.mark.parametrize(
  ("rows", "length"), [(1, 64), (2, 64), (2, 1)], ids=range(3)
)
def test_devices_send_sums_of_experts(mlp, grouped, rows, length):
  """A number for each input, not one for each of a token's experts."""
  call, state = mlp
  mesh = parse_mesh("model:4")
  with jax.set_mesh(mesh):
    x = inputs(length)[:rows]
    text = jax.jit(call).lower(state, x).compile().as_text()
  sums = [
    each.nbytes * each.times
    for each in collectives(Module.of(text))
    if each.opcode in ("all-reduce", "reduce-scatter")
  ]
  # Of a prompt alone, each keeps its tokens.
  assert sums == [x.nbytes / 4 if rows == 1 else x.nbytes]
