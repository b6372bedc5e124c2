"""What compiles for a GPU that is not attached; run by `make test-gpu`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from made_up_chip import program

import kvjax
from kvjax.experiments.compilation import (
  chips,
  engine_programs,
  kernel_programs,
)
from kvjax.experiments.compilation.programs import compiled
from kvjax.kernels.specs import Spec, named_specs

pytestmark = pytest.mark.cuda


def test_a_gpu_is_known():
  chips.prepare_cuda()
  found = chips.Chip.load("h100")
  (device,) = found.devices
  assert (device.platform, device.compute_capability) == ("gpu", "9.0")
  assert 79e9 < found.hbm_bytes < 86e9
  assert 3.3e12 < found.bytes_per_second < 3.4e12


@pytest.mark.parametrize("name", ["paged_attention", "prompt_attention"])
def test_a_kernel_for_gpus_is_measured(name):
  """A kernel of Pallas, and cuDNN's, of which there is only the version."""
  chips.prepare_cuda()
  spec = next(spec for named, spec in named_specs() if named == name)
  toy = kernel_programs.of_spec(name, spec)
  outcome = compiled(toy, chips.Chip.load("h100"))
  assert outcome.fault is None
  found = outcome.footprint
  assert len(found.kernels) == 1
  results = jax.tree.leaves(jax.eval_shape(spec.run, *spec.shapes))
  for nbytes, arrays in (
    (found.arguments, spec.shapes),
    (found.results, results),
  ):
    whole = sum(x.size * x.dtype.itemsize for x in arrays)
    assert whole <= nbytes < whole + 1024


def test_what_does_not_compile_for_a_gpu_is_a_fault():
  """A block of Hopper has 227 KiB of shared memory."""
  chips.prepare_cuda()

  def kernel(x):
    def body(x_ref, out_ref, scratch):
      scratch[:128] = x_ref[...]
      out_ref[...] = scratch[:128]

    shape = jax.ShapeDtypeStruct((128,), jnp.float32)
    scratch = [plgpu.SMEM((64 * 1024,), jnp.float32)]
    return plgpu.kernel(body, out_type=shape, scratch_types=scratch)(x)

  spec = Spec("toy", kernel, lambda _: (jnp.zeros(128),), 1024)
  toy = kernel_programs.of_spec("toy", spec)
  outcome = compiled(toy, chips.Chip.load("h100"))
  assert outcome.fault is not None
  assert "shared memory" in outcome.fault


@pytest.mark.parametrize(
  ("lower", "use", "expected"),
  [
    (
      engine_programs.lower_prefill,
      engine_programs.COMPACTOR,
      ("dot_product_attention_fwd", "mpmd_map"),
    ),
    (
      engine_programs.lower_decode,
      engine_programs.ADAKV_IN_INT8,
      ("mpmd_map",),
    ),
    (
      engine_programs.lower_decode,
      engine_programs.CTKVR_ON_DEVICE,
      ("mpmd_map",),
    ),
  ],
  ids=["prefill", "paged", "retrieved"],
)
def test_the_engine_has_its_kernels_for_gpus(lower, use, expected):
  """Named after JAX's functions: cuDNN's attention, and Pallas kernels."""
  chips.prepare_cuda()
  one = program("engine", use.name, lower=functools.partial(lower, use, 1))
  outcome = compiled(one, chips.Chip.load("h100"))
  assert outcome.fault is None
  assert outcome.footprint.kernels == expected


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("method", ["keydiff", "pyramidkv"])
def test_decoding_copies_no_weights_on_gpus(method, rows):
  """Neither of a loop's layer nor of one whose cache has a size of its own."""
  chips.prepare_cuda()
  plan = kvjax.get_plan(method, kvjax.Retention(0.25))
  use = engine_programs.Use(method, "", plan, 32_768, rows=rows)
  lower = functools.partial(engine_programs.lower_decode, use, 2)
  one = program("decode", method, lower=lower)
  outcome = compiled(one, chips.Chip.load("h100"))
  assert outcome.fault is None
  # cuBLAS has a workspace of 32 MiB; the output matrix of an MLP takes 112.
  assert outcome.footprint.temporary < 40 * 2**20


@pytest.mark.parametrize(
  ("use", "layers"),
  # Five layers with a window and one without; one of each.
  list(zip(engine_programs.HYBRIDS, (12, 4), strict=True)),
  ids=["gemma-3", "gpt-oss"],
)
def test_patterns_of_layers_copy_no_weights_on_gpus(use, layers):
  chips.prepare_cuda()
  lower = functools.partial(engine_programs.lower_decode, use, layers)
  one = program("decode", use.name, lower=lower)
  outcome = compiled(one, chips.Chip.load("h100"))
  assert outcome.fault is None
  assert outcome.footprint.temporary < 48 * 2**20
