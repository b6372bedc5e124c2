import importlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from kvjax import kernels
from kvjax.kernels.dispatch import dispatch, target_platform
from kvjax.kernels.gather import compact
from kvjax.kernels.paged_attention import paged_attention
from kvjax.kernels.programs import Programs
from kvjax.kernels.prompt_attention import api as prompt_attention_api
from kvjax.kernels.prompt_attention import prompt_attention
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.kernels.specs import named_specs


def declining(*_, **__):
  raise NotImplementedError("It does not serve.")


def adding(number):
  return lambda x, y, by: x + by * number + (0 if y is None else y)


def drawn(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


SLOTS = jnp.asarray([[[0, 3, 4, 40, -1], [7, 8, 9, 10, 63]]], jnp.int32)
PLACES = jnp.arange(64, dtype=jnp.int32)[None]
PAGES = jnp.arange(96, dtype=jnp.int32).reshape(1, 3, 32)
OWNERS = jnp.asarray([[1, 0, 1]], jnp.int32)
DIFFERENTIABLE = {
  "prompt_attention": (
    lambda q, k, v: [prompt_attention(q, k, v, PLACES)],
    [drawn(0, 1, 4, 64, 64), *(drawn(seed, 1, 2, 64, 64) for seed in (1, 2))],
  ),
  "gather": (
    lambda k, v: compact(
      k, v, jnp.broadcast_to(PLACES, (1, 2, 64)), None, SLOTS
    )[:2],
    [drawn(1, 1, 2, 64, 64), drawn(2, 1, 2, 64, 64)],
  ),
  "paged_attention": (
    lambda q, k, v: paged_attention(
      q, k, v, jnp.full((1, 1), 99, jnp.int32), PAGES, OWNERS, kv_heads=2
    ),
    [drawn(0, 1, 4, 1, 64), *(drawn(seed, 1, 3, 32, 64) for seed in (1, 2))],
  ),
  "sparse_decode": (
    lambda q, k, v: sparse_decode(q, k, v, SLOTS),
    [drawn(0, 1, 4, 64), drawn(1, 1, 2, 64, 64), drawn(2, 1, 2, 64, 64)],
  ),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_kernels_have_the_gradients_of_xla(name):
  operation, operands = DIFFERENTIABLE[name]

  def total(*operands):
    return sum(jnp.sum(jnp.sin(x)) for x in operation(*operands))

  differentiate = jax.value_and_grad(total, argnums=range(len(operands)))
  with kernels.use("xla"):
    expected = differentiate(*operands)
  with pltpu.force_tpu_interpret_mode(), kernels.use("pallas", "tpu"):
    found = differentiate(*operands)
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


WILLING = Programs(adding(1), adding(10), adding(100))
UNWILLING = Programs(adding(1), declining, declining)


def run(programs, x=None, y=None):
  x = jnp.zeros((2, 4, 3)) if x is None else x
  return dispatch(programs, (x, y), ("BK", "B"), "BK", by=2)


@pytest.mark.parametrize(
  ("implementation", "platform", "expected"),
  [
    (None, None, 2),
    (None, "cpu", 2),
    (None, "tpu", 20),
    (None, "gpu", 200),
    ("xla", "tpu", 2),
    ("pallas", "gpu", 200),
    ("pallas", "cpu", 20),
  ],
)
def test_the_platform_or_the_user_chooses(implementation, platform, expected):
  with kernels.use(implementation, platform):
    assert run(WILLING).max() == expected


def test_programs_are_for_the_default_device(monkeypatch):
  with jax.default_device("gpu"):
    assert target_platform() == "gpu"
    with kernels.use(platform="tpu"):
      assert target_platform() == "tpu"
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert target_platform() == "gpu"
  with jax.default_device(jax.devices("cpu")[0]):
    assert target_platform() == "cpu"
    assert run(WILLING).max() == 2


def test_one_operation_has_another_program(monkeypatch):
  monkeypatch.setattr(Programs, "operation", "select")
  x = jnp.zeros((2, 4, 3))
  compiled = jax.jit(lambda x: run(WILLING, x=x).max())
  with kernels.use(platform="tpu"):
    assert compiled(x) == 20
  given = {"select": "xla"}
  with kernels.use(platform="tpu", overrides=given):
    given.clear()
    # Also a key of what is compiled.
    assert compiled(x) == 2
    with kernels.use("pallas", "tpu"):
      assert compiled(x) == 20
  with kernels.use("pallas", "tpu", overrides={"gather": "xla"}):
    assert compiled(x) == 20


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
  ("choice", "said"),
  [
    ({"overrides": {"sele": "xla"}}, "'sele' is none of attention_mass, "),
    ({"overrides": {"select": "XLA"}}, "'XLA' is none of xla, pallas"),
    ({"implementation": "XLA"}, "'XLA' is none of xla, pallas"),
    ({"platform": "cuda"}, "'cuda' is none of cpu, gpu, tpu"),
  ],
)
def test_what_cannot_be_chosen_is_named(choice, said):
  """Or it would choose the kernels that it was meant to turn off."""
  with pytest.raises(ValueError, match=said), kernels.use(**choice):
    pass


def test_other_backends_have_no_kernels(monkeypatch):
  """Not those of TPUs."""
  monkeypatch.setattr(jax, "default_backend", lambda: "other")
  assert run(WILLING).max() == 2


def test_another_choice_compiles_another_program():
  compiled = jax.jit(lambda x: run(WILLING, x=x))
  x = jnp.zeros((2, 4, 3))
  assert compiled(x).max() == 2
  with kernels.use(platform="tpu"):
    assert compiled(x).max() == 20
  assert compiled(x).max() == 2


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_where_a_kernel_declines_xla_serves_unless_pallas_was_asked(platform):
  with kernels.use(platform=platform):
    assert run(UNWILLING).max() == 2
  with (
    kernels.use("pallas", platform),
    pytest.raises(NotImplementedError, match="does not serve"),
  ):
    run(UNWILLING)


@pytest.mark.parametrize(
  ("capability", "hopper", "library"),
  [
    ("7.5", 2, 2),
    ("8.0", 2, 200),
    ("8.9", 2, 200),
    ("9.0", 200, 200),
    ("10.0", 2, 200),
    ("gfx942", 2, 2),
  ],
)
def test_kernels_for_one_kind_of_gpu_decline_another(
  monkeypatch, capability, hopper, library
):
  gpu = types.SimpleNamespace(compute_capability=capability)
  x = jnp.zeros((2, 4, 3))
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax, "devices", lambda: [gpu])
  assert run(WILLING, x=x).max() == hopper
  cudnn = WILLING._replace(gpus=prompt_attention_api._PROGRAMS.gpus)
  assert run(cudnn, x=x).max() == library
  if hopper == 2:
    with (
      kernels.use("pallas"),
      pytest.raises(NotImplementedError, match=f"has {capability}"),
    ):
      run(WILLING, x=x)


@pytest.mark.parametrize(
  ("rows", "heads", "share"), [(2, 4, (1, 2)), (3, 4, (3, 2)), (4, 3, (2, 3))]
)
def test_on_a_mesh_a_kernel_sees_a_devices_share(rows, heads, share):
  seen = []

  def kernel(x, y, by):
    seen.append((x.shape, None if y is None else y.shape))
    return x + by + (0 if y is None else y[:, None, None])

  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
  x = jax.random.normal(jax.random.key(0), (rows, heads, 5))
  y = jnp.arange(rows, dtype=jnp.float32)
  programs = Programs(adding(1), kernel, kernel)
  with jax.set_mesh(mesh), kernels.use(platform="tpu"):
    both = jax.jit(lambda x, y: run(programs, x=x, y=y))(x, y)
    alone = jax.jit(lambda x: run(programs, x=x))(x)
  assert seen == [((*share, 5), share[:1]), ((*share, 5), None)]
  np.testing.assert_array_equal(both, x + 2 + y[:, None, None])
  np.testing.assert_array_equal(alone, x + 2)


def test_each_operation_with_kernels_has_a_name():
  named = {operation for operation, _ in named_specs()}
  assert set(kernels.OPERATIONS) == named


@pytest.mark.parametrize("operation", kernels.OPERATIONS)
def test_kernels_are_found_by_the_name_of_xlas_program(operation):
  api = importlib.import_module(f"kvjax.kernels.{operation}.api")
  found = [each for each in vars(api).values() if isinstance(each, Programs)]
  assert found
  for programs in found:
    assert programs.operation == operation
    for platform in ("tpu", "gpu"):
      if platform == "gpu" and operation in ("gather", "sparse_decode"):
        # On a GPU, XLA's program is as fast.
        assert programs.kernel(platform) is None
        continue
      # Nothing is passed: the kernel is found, and misses its operands.
      with pytest.raises(TypeError, match="missing"):
        programs.kernel(platform)()


def test_a_platform_without_a_kernel_has_that_of_xla():
  programs = Programs(lambda x: x + 1, lambda x: x + 10, None)
  for implementation in ("pallas", None):
    with kernels.use(implementation, platform="gpu"):
      assert dispatch(programs, (jnp.ones(()),), ("",), "") == 2


def test_pallas_and_matplotlib_are_imported_when_they_are_used():
  code = (
    "import sys, kvjax.experiments.compare; "
    "print({'matplotlib', 'jax.experimental.pallas'} & {*sys.modules})"
  )
  printed = subprocess.check_output([sys.executable, "-c", code], text=True)
  assert printed == "set()\n"
