"""The last tokens of rows, and that the others are not copied for them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.cache.row_ends import row_ends
from kvjax.cache.sharding import parse_mesh
from kvjax.cache.window import WindowLayer
from kvjax.errors import InputError
from kvjax.experiments.compilation import chips
from kvjax.experiments.compilation.engine_programs import compiling_for
from kvjax.kernels.compiled.collectives import collectives
from kvjax.kernels.compiled.hlo import Module
from kvjax.methods import LagKV
from kvjax.methods.last_queries import window_mass, window_queries
from kvjax.testing import random_activations

LENGTHS, PADDED = [20, 7, 6, 2, 0, 19], 20
_GATHERS = re.compile(r" = (?:f32|bf16)\S* gather\(")


def ends_by_hand(x, lengths, size):
  """Slices of rows; [B, H, S, D] or [B, S]."""
  axis = x.ndim - (2 if x.ndim == 4 else 1) - 1
  starts = [min(max(n - size, 0), x.shape[axis + 1] - size) for n in lengths]
  rows = zip(x, starts, strict=True)
  return np.stack(
    [np.take(row, range(at, at + size), axis=axis) for row, at in rows]
  )


def test_a_window_without_queries_is_refused():
  activations = random_activations(0, LENGTHS, PADDED)
  cache = LayerCache.of(activations)
  with pytest.raises(InputError, match="whole number, 1 or more; 0 is not"):
    window_mass(cache, activations, 0)


@pytest.mark.parametrize("size", [1, 6, 19, 20])
def test_the_last_tokens_of_every_row_are_cut_out(size):
  """Where a row has fewer, its padding follows, which here is NaN."""
  seen = random_activations(1, LENGTHS, PADDED)
  arrays = seen.keys, seen.values
  found, positions = jax.jit(row_ends, static_argnums=2)(
    arrays, seen.positions, size
  )
  for ours, x in zip(
    (*found, positions), (*arrays, seen.positions), strict=True
  ):
    expected = ends_by_hand(np.asarray(x), LENGTHS, size)
    np.testing.assert_array_equal(ours, expected)


def test_only_the_last_tokens_have_a_gradient():
  seen = random_activations(1, [9, 3], 9)

  def total(keys):
    ends, _ = row_ends(keys, seen.positions, 4)
    return jnp.nansum(ends)

  found = jax.grad(total)(seen.keys)[:, 0, :, 0]
  expected = [[0] * 5 + [1] * 4, [1] * 3 + [0] * 6]
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("mesh", ["data:2,model:2", "context:2,model:2"])
def test_devices_that_share_out_rows_or_tokens_send_no_whole_rows(mesh):
  rows, heads, length, width, size = 4, 2, 64, 8, 5
  lengths = [64, 40, 3, 0]
  seen = random_activations(2, lengths, length, heads=heads, kv_heads=heads)
  devices = parse_mesh(mesh)
  axes = ("data", "model", "context" if "context" in mesh else None)
  place = NamedSharding(devices, PartitionSpec(*axes))
  keys = jax.device_put(seen.keys, place)
  with jax.set_mesh(devices):
    run = jax.jit(row_ends, static_argnums=2)
    program = run.lower(keys, seen.positions, size).compile()
    found, positions = program(keys, seen.positions)
  moved = collectives(Module.of(program.as_text()))
  most = 4 * rows * heads * size * width
  assert all(each.largest <= most for each in moved)
  expected = ends_by_hand(np.asarray(seen.keys), lengths, size)
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(
    positions, ends_by_hand(np.asarray(seen.positions), lengths, size)
  )


def test_a_window_of_a_prompt_is_as_if_its_tokens_came_one_by_one():
  seen = random_activations(3, LENGTHS, PADDED)
  ring = WindowLayer.of(seen, 6)
  observed = ObservationWindow.empty(seen, 6).append(seen)
  one_ring = WindowLayer.of(_tokens(seen, 0), 6)
  one_observed = ObservationWindow.empty(seen, 6).append(_tokens(seen, 0))
  for token in range(1, PADDED):
    one_ring = one_ring.append(_tokens(seen, token))
    one_observed = one_observed.append(_tokens(seen, token))
  for ours, theirs, names in (
    (ring, one_ring, ("positions", "keys", "values")),
    (observed, one_observed, ("positions", "queries")),
  ):
    for name in names:
      np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def _tokens(seen, at):
  """The block of the one token at a place of each row, or padding."""
  return dataclasses.replace(
    seen.only(()),
    queries=seen.queries[:, :, at : at + 1],
    keys=seen.keys[:, :, at : at + 1],
    values=seen.values[:, :, at : at + 1],
    positions=seen.positions[:, at : at + 1],
  )


def read_queries(seen):
  """Of a prompt."""
  return window_queries(LayerCache.of(seen), seen, 32)


def observe_queries(seen):
  """Of a prompt, which a method evicts from later."""
  return ObservationWindow.empty(seen, 32).append(seen)


@pytest.mark.parametrize("read", [read_queries, observe_queries])
def test_no_queries_are_gathered_from_a_prompt(read):
  """On an accelerator, all of them would be copied for it."""
  seen = random_activations(0, [2048, 40], 2048)
  program = jax.jit(read).lower(seen.only(())).compile()
  gathered = _GATHERS.findall(program.as_text())
  whole = seen.queries.nbytes
  if read is read_queries:
    assert not gathered
  assert program.memory_analysis().temp_size_in_bytes < whole / 4


def score(seen):
  """Of a prompt, as SnapKV does."""
  return window_mass(LayerCache.of(seen), seen, 32)


@pytest.mark.libtpu
@pytest.mark.parametrize(
  ("read", "rows"), [(score, 1), (score, 4), (observe_queries, 4)]
)
def test_a_tpu_copies_only_the_queries_that_are_read(read, rows):
  shapes, temporary = for_tpu(read, rows, 32_768, heads=32, kv_heads=8)
  assert temporary < 2 * shapes.queries.size / 8


@pytest.mark.libtpu
def test_a_tpu_scores_whole_prompts_of_lagkv_where_they_are():
  def read(seen):
    return LagKV(16, 128).evaluate(jnp.int32(0), LayerCache.of(seen), seen)

  shapes, temporary = for_tpu(read, 1, 32_768, heads=8, kv_heads=8)
  assert temporary < 2 * (shapes.keys.size + shapes.values.size) / 8


def for_tpu(read, rows, length, **heads):
  """Shapes of a prompt in bfloat16, and what a program needs besides it."""
  chips.prepare_libtpu()
  v5e = chips.Chip.load("v5e")
  one = dataclasses.replace(v5e, devices=v5e.devices[:1])
  place = NamedSharding(one.lone, PartitionSpec())
  small = random_activations(0, [1] * rows, 1, head_dim=128, **heads).only(())

  def shape(x):
    sizes = (
      (*x.shape[:2], length, x.shape[3]) if x.ndim == 4 else (rows, length)
    )
    dtype = jnp.bfloat16 if x.ndim == 4 else x.dtype
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

  shapes = jax.tree.map(shape, small)
  with compiling_for(one):
    program = jax.jit(read).lower(shapes).compile()
  return shapes, program.memory_analysis().temp_size_in_bytes
