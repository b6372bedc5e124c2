"""How arrays lie in the memory of a TPU, and that others do not notice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import kernels
from kvjax.cache.narrow import NarrowLayer
from kvjax.kernels.layouts import row_major, whole_tiles
from kvjax.kernels.programs import Platform
from kvjax.testing import TinyModel


def test_only_tpus_have_whole_tiles():
  assert whole_tiles(4097) == 4097
  with kernels.use(platform="tpu"):
    assert [whole_tiles(n) for n in (0, 1, 8, 4097)] == [0, 8, 8, 4104]


def test_a_cache_grows_to_whole_tiles():
  """Its tokens stay, and the slots beyond them are empty."""
  model = TinyModel()
  prompts = kvjax.Prompts.of([[1, 2, 3, 4, 5], [6, 7]])
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  with kernels.use(platform="tpu"):
    reserved = kvjax.reserve(cache, 8)
  assert kvjax.reserve(cache, 8).layer(0).capacity == 11
  layer, before = reserved.layer(0), cache.layer(0)
  assert layer.capacity == 16
  np.testing.assert_array_equal(layer.positions[..., :3], before.positions)
  assert (layer.positions[..., 3:] == -1).all()
  # It takes as many bytes as it says.
  assert layer.nbytes == sum(x.nbytes for x in jax.tree.leaves(layer))


def test_spare_slots_of_a_ring_come_in_whole_tiles():
  """Whatever the size of the ring, which is an array of its own."""
  model = TinyModel()
  prompts = kvjax.Prompts.of([list(range(1, 61))])
  plan = kvjax.get_plan("ctkvr:max_resident=13:sinks=2:local=4", 0.1)
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  with kernels.use(platform="tpu"):
    once = kvjax.reserve(cache, 5)
    twice = kvjax.reserve(once, 1)
  assert kvjax.reserve(cache, 5).layer(0).capacity == 13 + 5
  for reserved, spare in ((once, 8), (twice, 16)):
    layer = reserved.layer(0)
    assert layer.capacity == 13 + spare
    assert layer.stored.capacity % 8 == 0


def test_kept_tokens_with_fewer_channels_come_in_whole_tiles():
  """They never grow; the tokens are the same ones as elsewhere."""
  model, plan = TinyModel(), kvjax.get_plan("think/keydiff", kvjax.Tokens(3))
  prompts = kvjax.Prompts.of([[1, 2, 3, 4, 5], [6, 7]])

  def keep(platform: Platform) -> NarrowLayer:
    with kernels.use("xla", platform=platform):
      cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
    layer = cache.layer(0)
    assert isinstance(layer, NarrowLayer)
    return layer

  layer, expected = keep("tpu"), keep("cpu")
  assert layer.kept.keys.shape[2] == layer.kept.capacity == 8
  assert expected.kept.capacity == 3
  for row in range(2):
    assert layer.row_positions(row) == expected.row_positions(row)
  assert layer.tail.capacity == 0


@pytest.mark.parametrize("shape", [(), (2, 3, 64), (2, 3, 128)])
def test_row_major_changes_no_value(shape):
  """Within and outside of `vmap` and of gradients."""
  x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
  with kernels.use(platform="tpu"):
    np.testing.assert_array_equal(jax.jit(row_major)(x), x)
    if shape:
      rows = jax.jit(jax.vmap(row_major, in_axes=1, out_axes=1))(x)
      np.testing.assert_array_equal(rows, x)
    gradient = jax.grad(lambda x: jnp.sum(row_major(x) ** 2))(x)
  np.testing.assert_array_equal(gradient, 2 * x)


def test_only_axes_that_fill_lanes_are_constrained():
  def constrained(width: int, platform: Platform) -> bool:
    with kernels.use(platform=platform):
      jaxpr = jax.make_jaxpr(row_major)(jnp.zeros((2, width)))
    return "layout_constraint" in str(jaxpr)

  assert constrained(256, "tpu")
  assert not constrained(64, "tpu")
  assert not constrained(256, "cpu")
