"""Rows that the host holds: bit by bit those of numpy, and where they are."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax import kernels, placement
from kvjax.cache.rows import Rows
from kvjax.cache.sharding import parse_mesh
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.kernels.sparse_decode.ranked import Best, ranked_decode_host
from kvjax.placement import (
  gather_rows,
  has_host_memory,
  is_on_host,
  nbytes_by_memory,
  to_host,
)

B, K, F, D, M = 2, 4, 9, 3, 6
RNG = np.random.default_rng(0)
# Rows 0 and 5 are never named: what stands for none must not come from them.
KEYS = RNG.normal(size=(B, K, F, D)).astype(np.float32)
KEYS[:, :, [0, 5]] = np.nan
VALUES = -KEYS
SLOTS = RNG.choice([-1, 1, 2, 3, 4, 6, 7, 8], (B, K, M)).astype(np.int32)

gathered = jax.jit(gather_rows)
WAYS = {"eager": gather_rows, "compiled": gathered}


def by_hand(rows, slots):
  found = np.zeros((*slots.shape, D), rows.dtype)
  for place in np.ndindex(slots.shape):
    if slots[place] >= 0:
      found[place] = rows[*place[:-1], slots[place]]
  return found


def kinds(tree):
  return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("place", [to_host, jax.device_put])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_numpy(place, dtype, way):
  rows = place([jnp.asarray(x, dtype) for x in (KEYS, VALUES)])
  found = WAYS[way](rows, jnp.asarray(SLOTS))
  assert kinds(found) == {"device"}
  for ours, x in zip(found, (KEYS, VALUES), strict=True):
    np.testing.assert_array_equal(ours, by_hand(x.astype(dtype), SLOTS))


@pytest.mark.parametrize("place", [to_host, jax.device_put])
def test_rows_of_a_layer_in_a_stack(place):
  stacks = [place(jnp.stack([-x, x, 2 * x])) for x in (KEYS, VALUES)]
  found = gathered(stacks, jnp.asarray(SLOTS), jnp.int32(1))
  assert kinds(found) == {"device"}
  for ours, x in zip(found, (KEYS, VALUES), strict=True):
    np.testing.assert_array_equal(ours, by_hand(x, SLOTS))


def test_loops_read_from_the_host():
  """What a loop carries on stays there; each turn names other rows."""

  def loop(rows, slots):
    def turn(state):
      step, rows, total = state
      found = gather_rows(rows, jnp.where(slots == step, slots, -1))
      return step + 1, rows, total + found

    total = jnp.zeros((*slots.shape, D))
    return jax.lax.while_loop(
      lambda state: state[0] < F, turn, (jnp.int32(0), rows, total)
    )

  rows = to_host(jnp.asarray(KEYS))
  _, after, total = jax.jit(loop)(rows, jnp.asarray(SLOTS))
  assert is_on_host(after)
  np.testing.assert_array_equal(after, KEYS)
  np.testing.assert_array_equal(total, by_hand(KEYS, SLOTS))

  def named(rows, slots):
    return rows, gather_rows(rows, slots)

  each = jnp.moveaxis(jnp.asarray(SLOTS), 2, 0)[..., None]
  after, found = jax.jit(lambda r, s: jax.lax.scan(named, r, s))(rows, each)
  assert is_on_host(after)
  found = jnp.moveaxis(found[..., 0, :], 0, 2)
  np.testing.assert_array_equal(found, by_hand(KEYS, SLOTS))


def test_a_mesh_splits_what_the_host_holds():
  mesh = parse_mesh("data:2,model:2")
  spread = NamedSharding(mesh, PartitionSpec("data", "model"))
  with jax.set_mesh(mesh):
    rows = jax.jit(to_host)(jax.device_put(KEYS, spread))
    found = gathered(rows, jax.device_put(SLOTS, spread))
  assert rows.sharding == spread.with_memory_kind("pinned_host")
  assert found.sharding.shard_shape(found.shape) == (1, 2, M, D)
  np.testing.assert_array_equal(found, by_hand(KEYS, SLOTS))


def test_arrays_move_to_the_host():
  tree = {"keys": jnp.asarray(KEYS), "count": jnp.int32(3)}
  for move in (to_host, jax.jit(to_host)):
    there = move(tree)
    assert kinds(there) == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, tree, there)


def test_bytes_are_counted_where_they_are():
  """Of arrays, of what is traced, and of shapes alone."""

  def both(x):
    return {"here": (x, x[0].astype(jnp.bfloat16)), "there": to_host(x[1:])}

  def counted(x):
    traced.append(nbytes_by_memory(both(x)))
    return both(x)

  traced = []
  x = jnp.zeros((5, 7, 3))
  expected = {"device": 5 * 7 * 3 * 4 + 7 * 3 * 2, "pinned_host": 4 * 7 * 3 * 4}
  made = jax.jit(counted)(x)
  for tree in (made, jax.eval_shape(both, x)):
    assert nbytes_by_memory(tree) == expected
  assert traced == [expected]
  assert sum(leaf.nbytes for leaf in jax.tree.leaves(made)) == sum(
    expected.values()
  )


class _Memory:
  kind = "device"


class _Device:
  def addressable_memories(self):
    return [_Memory()]


def test_backends_are_asked(monkeypatch):
  def refused():
    raise NotImplementedError("no computations on the host")

  assert has_host_memory.__wrapped__()
  with monkeypatch.context() as context:
    context.setattr(placement, "_trial", refused)
    assert not has_host_memory.__wrapped__()
  monkeypatch.setattr(jax, "local_devices", lambda: [_Device()])
  assert not has_host_memory.__wrapped__()


def test_without_host_memory_everything_stays(monkeypatch):
  monkeypatch.setattr(placement, "has_host_memory", lambda: False)
  tree = [jnp.asarray(KEYS)]
  assert to_host(tree) is tree
  assert nbytes_by_memory(tree) == {"device": KEYS.nbytes, "pinned_host": 0}
  (found,) = gathered(tree, jnp.asarray(SLOTS))
  np.testing.assert_array_equal(found, by_hand(KEYS, SLOTS))


def gathering(rows, slots):
  """Compares rows that are gathered with each other."""
  found = gather_rows(rows, slots)
  worth = jnp.einsum("bkmd,bkmd->bkm", *found)
  return jnp.argsort(worth, axis=-1).astype(jnp.int32)


def attending(rows, slots):
  """Ranks keys by a query, and attends to the better half."""
  half = slots.shape[-1] // 2
  query = slots[..., :1, None].astype(jnp.float32)
  query = jnp.broadcast_to(query, (*slots.shape[:2], 1, 128))
  logits = Rows(*rows).logits(slots, query)[:, :, 0]
  order = jnp.argsort(logits, axis=-1).astype(jnp.int32)
  best = jnp.take_along_axis(slots, order[..., half:], axis=-1)
  attended = sparse_decode(query[:, :, 0].astype(rows[0].dtype), *rows, best)
  lowest = jnp.argmin(attended.lse, axis=1).astype(jnp.int32)
  return (slots + lowest[:, None, None]) % rows[0].shape[2]


def ranking(rows, slots):
  """Lets the host rank keys by a query, and attend to the better half."""
  half = slots.shape[-1] // 2
  query = jnp.broadcast_to(slots[..., :1], (*slots.shape[:2], 128))
  best = Best(jnp.full(slots.shape[:2], half, jnp.int32), half)
  attended, listed = ranked_decode_host(
    query.astype(rows[0].dtype), *rows, slots, best, best
  )
  lowest = jnp.argmin(attended.lse, axis=1).astype(jnp.int32)
  slots = jnp.concatenate([listed, listed], axis=-1) + lowest[:, None, None]
  return slots % rows[0].shape[2]


@pytest.mark.libtpu
@pytest.mark.parametrize(
  ("read", "listed"), [(gathering, 256), (attending, 4096), (ranking, 4096)]
)
def test_tpus_leave_it_with_the_host(monkeypatch, read, listed):
  """Compiled for eight chips: none holds a copy, and none asks another."""
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
  chips = topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:2x4"
  ).devices
  mesh = Mesh(
    np.asarray(chips).reshape(1, 8),
    ("data", "model"),
    axis_types=(AxisType.Auto,) * 2,
  )
  spread = NamedSharding(mesh, PartitionSpec("data", "model"))

  def shape(dtype, kind, *axes):
    sharding = spread.with_memory_kind(kind)
    return jax.ShapeDtypeStruct(axes, dtype, sharding=sharding)

  def loop(rows, slots):
    def turn(state):
      rows, slots, step = state
      return rows, read(rows, slots), step + 1

    start = (rows, slots, jnp.int32(0))
    return jax.lax.while_loop(lambda state: state[2] < 9, turn, start)

  rows = (shape(jnp.bfloat16, "pinned_host", 1, 8, 16384, 128),) * 2
  slots = shape(jnp.int32, "device", 1, 8, listed)
  with jax.set_mesh(mesh), kernels.use(platform="tpu"):
    program = jax.jit(loop, donate_argnums=0).lower(rows, slots).compile()
  memory = program.memory_analysis()
  valid = nbytes_by_memory(rows)["pinned_host"] // len(chips)
  assert valid == 2 * math.prod(rows[0].shape) * 2 // 8
  assert memory.host_argument_size_in_bytes == valid
  assert memory.host_alias_size_in_bytes == valid
  assert memory.host_temp_size_in_bytes == 0
  on_device = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  assert on_device < valid // 8
  if read is not gathering:  # not even the listed rows
    assert on_device < listed * 128 * 2
  assert "all-gather" not in program.as_text()
