import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from kvjax.kernels import use
from kvjax.kernels.gather import Compacted, compact
from kvjax.kernels.gather.reference import compact_reference
from kvjax.kernels.gather.tile_order import Plan
from kvjax.kernels.gather.tpu import compact_tpu

TPU = functools.partial(
  pltpu.force_tpu_interpret_mode, pltpu.InterpretParams(detect_races=True)
)


def drawn(
  batch, kv_heads, length, most, dim, dtype, *, remembered=True, holes=False
):
  """Any bits at all: NaN, infinities, denormals and both zeros are among them.

  Heads name anything from no slot to as many as fit.
  """
  random = np.random.default_rng(length)

  def bits(shape, dtype):
    size = np.prod(shape) * np.dtype(dtype).itemsize
    return jnp.asarray(
      np.frombuffer(random.bytes(size), np.uint8).view(dtype).reshape(shape)
    )

  shape = (batch, kv_heads, length)
  slots = np.full((batch * kv_heads, most), -1, np.int32)
  full = min(most, length)
  for head, row in enumerate(slots):
    count = [full // 2, full, 0, 1][head % 4]
    place = np.arange(count)
    if holes:
      place = np.sort(random.choice(most, count, replace=False))
    row[place] = np.sort(random.choice(length, count, replace=False))
  return (
    bits((*shape, dim), dtype),
    bits((*shape, dim), dtype),
    jnp.asarray(random.integers(-1, 10**6, shape), jnp.int32),
    bits(shape, np.float32) if remembered else None,
    jnp.asarray(slots.reshape(batch, kv_heads, most)),
  )


def assert_same_bits(actual, wanted):
  for name, a, b in zip(Compacted._fields, actual, wanted, strict=True):
    if b is None:
      assert a is None
      continue
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    a, b = (np.ascontiguousarray(x).view(np.uint8) for x in (a, b))
    np.testing.assert_array_equal(a, b, err_msg=name)


def by_hand(keys, values, positions, remembered, slots):
  """Slot by slot."""

  def listed(x, none=0):
    if x is None:
      return None
    x, at = np.asarray(x), np.asarray(slots)
    actual = np.full((*at.shape, *x.shape[3:]), none, x.dtype)
    for b, k, m in np.argwhere(at >= 0):
      actual[b, k, m] = x[b, k, at[b, k, m]]
    return actual

  return listed(keys), listed(values), listed(positions, -1), listed(remembered)


@pytest.mark.parametrize("run", [compact, compact_reference])
@pytest.mark.parametrize(
  ("sizes", "holes"),
  [
    ((2, 2, 37, 21, 64, jnp.bfloat16), False),
    ((1, 3, 40, 50, 128, jnp.float32), True),
    ((1, 2, 129, 33, 128, jnp.int8), True),
  ],
  ids=["bfloat16", "float32", "int8"],
)
def test_xla_copies_every_bit(run, sizes, holes):
  operands = drawn(*sizes, holes=holes)
  assert_same_bits(jax.jit(run)(*operands), by_hand(*operands))


@pytest.mark.parametrize(
  ("sizes", "options", "holes"),
  [
    ((1, 2, 2100, 150, 64, jnp.bfloat16), {"write": 128}, True),
    ((1, 1, 1025, 140, 256, jnp.float32), {"read": 1024, "write": 128}, False),
    ((2, 1, 3000, 40, 128, jnp.int8), {"read": 1024}, True),
  ],
  ids=["bfloat16", "float32", "int8"],
)
def test_tpu_copies_every_bit(chosen, sizes, options, holes):
  operands = drawn(*sizes, remembered=holes, holes=holes)
  chosen({"gather/tpu": options})
  with TPU():
    actual = jax.jit(compact_tpu)(*operands)
  assert_same_bits(actual, by_hand(*operands))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_tpu_copies_rows_of_every_size(dim, dtype):
  operands = drawn(1, 4, 2099, 37, dim, dtype, holes=True)
  with TPU():
    actual = jax.jit(compact_tpu)(*operands)
  assert_same_bits(actual, by_hand(*operands))


def test_a_tpu_reads_only_tiles_of_which_something_is_kept():
  slots = jnp.asarray([[[3, 4, 4096, -1, 9000, -1, -1, -1]]], jnp.int32)
  plan = jax.jit(lambda slots: Plan.of(slots, 10, read=1024, write=4))(slots)
  plan, slots = jax.tree.map(np.asarray, (plan, slots))
  np.testing.assert_array_equal(np.unique(plan.source), [0, 4, 8])
  begun, ended = plan.first[0, 0, :-1], plan.first[0, 0, 1:]
  for tile, part, begin, end in zip(
    plan.source[0, 0], plan.target[0, 0], begun, ended, strict=True
  ):
    rows = slots[0, 0, int(begin) : int(end)]
    assert set(rows[rows >= 0] // 1024) <= {int(tile)}
    assert begin == end or (begin // 4 == part == (end - 1) // 4)
  assert begun[0] == 0
  assert ended[-1] == slots.shape[-1]


@pytest.mark.slow
def test_every_device_of_a_mesh_copies_its_rows_and_heads():
  # Two heads for each, of one tile: half and all of it, no slot and one.
  operands = drawn(2, 4, 37, 20, 64, jnp.bfloat16)
  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
  with TPU(), jax.set_mesh(mesh), use("pallas", "tpu"):
    actual = jax.jit(compact)(*operands)
  assert_same_bits(actual, by_hand(*operands))


@pytest.mark.parametrize(
  ("platform", "sizes"),
  [
    ("tpu", (1, 1, 30, 0, 128, jnp.bfloat16)),
    ("tpu", (1, 1, 30, 4, 1024, jnp.float32)),
  ],
  ids=["tpu, no slots", "tpu, wide"],
)
def test_what_a_kernel_declines_xla_copies(platform, sizes):
  operands = drawn(*sizes)
  run = jax.jit(compact)
  with use("pallas", platform), pytest.raises(NotImplementedError):
    run(*operands)
  with use(platform=platform):
    actual = run(*operands)
  assert_same_bits(actual, by_hand(*operands))
