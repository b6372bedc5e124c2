"""Selection, by every program, against a stable sort in NumPy."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from kvjax import kernels
from kvjax.kernels.select import (
  among_largest,
  kth_largest,
  largest,
  mask_to_slots,
  slots_to_mask,
)
from kvjax.kernels.select.reference import (
  largest_reference,
  mask_to_slots_reference,
)
from kvjax.kernels.select.specs import SPECS

# Rows of 2 x 5: two blocks of a TPU's 8 rows, the second one not full.
ROWS = (2, 5)
LOWEST = np.finfo(np.float32).min


@contextlib.contextmanager
def on(platform):
  """The kernels of a platform, interpreted, with an eye on races."""
  interpret = {
    "xla": contextlib.nullcontext,
    "tpu": lambda: pltpu.force_tpu_interpret_mode(
      # Zeros behind the end of a row would be scores; NaN would not.
      pltpu.InterpretParams(detect_races=True, uninitialized_memory="zero")
    ),
    "gpu": lambda: plgpu.force_gpu_interpret_mode(
      plgpu.InterpretGPUParams(detect_races=True)
    ),
  }
  chosen = ("xla", None) if platform == "xla" else ("pallas", platform)
  with interpret[platform](), kernels.use(*chosen):
    yield


def draw(slots, size):
  """Scores of all kinds, and how many of each row are wanted."""
  rng = np.random.default_rng(slots + size)
  scores = rng.normal(size=(*ROWS, slots)).astype(np.float32)
  some, few = rng.random(slots) < 0.5, rng.random(slots) < 0.3
  scores[0, 1] = np.round(scores[0, 1])
  scores[0, 2, some] = -np.inf
  scores[0, 2, few] = [
    [np.nan, -np.nan, np.inf][i % 3] for i in range(few.sum())
  ]
  scores[0, 3] = 0.0
  scores[0, 3, some] = -0.0
  scores[0, 4] *= 1e-40  # not normal
  scores[1, 0] = np.nan
  scores[1, 1, some] = LOWEST
  scores[1, 1, ~some] = -np.inf
  scores[1, 2] = 1.0
  counts = np.full(ROWS, size)
  counts[0, 0] = size // 2
  counts[1, 1] = slots + 3
  counts[1, 2] = size - 1
  counts[1, 3] = -2 if size % 2 else 0
  counts[1, 4] = slots + 3
  return scores, counts.astype(np.int32)


CASES = [
  # Rows that are short for XLA's program, then others; 1,024 slots are whole
  # tiles of a TPU's, and 2,500 are more than one step of a GPU's.
  *(("xla", *shape) for shape in ((1, 1), (200, 70), (256, 256))),
  *(("xla", *shape) for shape in ((2049, 1), (3000, 500), (2100, 2100))),
  # So few that they are found one by one, and one more.
  *(("xla", *shape) for shape in ((300, 5), (2500, 8), (300, 9))),
  *(("tpu", *shape) for shape in ((5, 5), (1024, 130), (1500, 1))),
  *(("gpu", *shape) for shape in ((5, 5), (512, 300), (2500, 800))),
  *(
    pytest.param(platform, *shape, marks=pytest.mark.slow)
    for platform in ("tpu", "gpu")
    for shape in ((1, 1), (127, 126), (777, 300), (1025, 1025), (4097, 1000))
  ),
]


@pytest.mark.parametrize(("platform", "slots", "size"), CASES)
def test_largest_equals_a_sort(platform, slots, size):
  scores, counts = draw(slots, size)
  with on(platform):
    actual = jax.jit(functools.partial(largest, size=size))(scores, counts)
  np.testing.assert_array_equal(actual, largest_reference(scores, counts, size))


@pytest.mark.parametrize(
  ("platform", "slots", "size"),
  [
    *(("xla", 200, 60), ("xla", 2100, 300), ("tpu", 300, 90), ("gpu", 300, 90)),
    pytest.param("tpu", 1337, 700, marks=pytest.mark.slow),
    pytest.param("gpu", 1337, 700, marks=pytest.mark.slow),
  ],
)
def test_mask_to_slots_equal_a_sort(platform, slots, size):
  rng = np.random.default_rng(slots)
  mask = rng.random((*ROWS, slots)) < np.linspace(0, 1, 5)[None, :, None]
  with on(platform):
    actual = jax.jit(functools.partial(mask_to_slots, size=size))(mask)
  np.testing.assert_array_equal(actual, mask_to_slots_reference(mask, size))


@pytest.mark.parametrize("slots", [40, 700])
def test_masks_and_thresholds_agree_with_lists(slots):
  scores, counts = draw(slots, slots // 3)
  listed = largest_reference(scores, counts, slots)

  @jax.jit
  def run(scores, counts, listed):
    return (
      among_largest(scores, counts),
      slots_to_mask(listed, slots),
      kth_largest(scores, counts),
    )

  mask, named, actual = map(np.asarray, run(scores, counts, listed))
  np.testing.assert_array_equal(mask_to_slots_reference(mask, slots), listed)
  np.testing.assert_array_equal(named, mask)
  least = np.where(mask, scores, np.inf).min(axis=-1)
  # What is not normal may be taken for zero.
  np.testing.assert_allclose(actual, least, rtol=0, atol=1e-37)


def test_a_list_longer_than_the_row_is_filled_up():
  actual = largest(jnp.asarray([2.0, 1.0, 3.0]), jnp.asarray(2), 5)
  np.testing.assert_array_equal(actual, [0, 2, -1, -1, -1])


def per_head(scores, counts):
  return largest(scores, counts, 20)


def test_vmap_shows_a_program_the_whole_array():
  scores, counts = draw(70, 20)
  rows = np.moveaxis(scores, 0, -1)  # [K, T, B]
  wanted = counts[0]
  each = jax.vmap(jax.vmap(per_head), in_axes=(-1, None))
  expected = largest_reference(scores, np.stack([counts[0]] * 2), 20)
  np.testing.assert_array_equal(jax.jit(each)(rows, wanted), expected)
  with kernels.use("pallas", "tpu"):
    jaxpr = str(jax.make_jaxpr(each)(rows, wanted))
  assert jaxpr.count("pallas_call[") == 1
  assert "f32[10,70]" in jaxpr


def test_scores_of_other_dtypes_and_gradients():
  scores = jnp.asarray([3.0, 1.0, 2.0], jnp.bfloat16)

  def best(scores):
    return jnp.sum(scores[largest(scores, jnp.asarray(2), 2)])

  np.testing.assert_array_equal(jax.jit(jax.grad(best))(scores), [1, 0, 1])


def test_devices_of_a_mesh_select_from_their_shares():
  scores, counts = draw(300, 60)
  scores, counts = (
    np.concatenate([x, x[:, :1]], axis=1) for x in (scores, counts)
  )
  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
  with on("tpu"), jax.set_mesh(mesh):
    actual = jax.jit(functools.partial(largest, size=60))(scores, counts)
  assert {x.data.shape for x in actual.addressable_shards} == {(1, 3, 60)}
  np.testing.assert_array_equal(actual, largest_reference(scores, counts, 60))


def test_rows_too_long_for_vmem_are_declined():
  scores = jax.ShapeDtypeStruct((1, 8, 2**17 + 1), jnp.float32)
  counts = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  run = functools.partial(largest, size=4)
  with kernels.use("pallas", "tpu"), pytest.raises(NotImplementedError):
    jax.eval_shape(run, scores, counts)
  with kernels.use(platform="tpu"):
    assert jax.eval_shape(run, scores, counts).shape == (1, 8, 4)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_specs_are_of_their_shapes(spec):
  with kernels.use("pallas", "tpu"):
    actual = jax.eval_shape(spec.run, *spec.shapes)
  read = sum(x.size * x.dtype.itemsize for x in spec.shapes)
  assert spec.ideal_bytes == read + actual.size * 4


@pytest.mark.parametrize(
  "call",
  [
    lambda scores, counts: largest(scores, counts, 4),
    among_largest,
    kth_largest,
  ],
  ids=["largest", "among_largest", "kth_largest"],
)
def test_a_second_eager_call_compiles_nothing(call):
  scores, counts = jnp.arange(3000.0)[None], jnp.array([2])
  call(scores, counts)
  compiled = []

  def listen(event, seconds, **_):
    del seconds
    if "backend_compile" in event:
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    call(scores, counts)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert not compiled


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(
  ("rows", "slots", "size"), [(0, 8, 4), (2, 8, 0), (2, 0, 4)]
)
def test_nothing_is_selected_from_nothing(platform, rows, slots, size):
  scores, counts = jnp.ones((rows, slots)), jnp.zeros(rows, jnp.int32)
  with kernels.use(platform=platform):
    assert largest(scores, counts, size).shape == (rows, size)
