"""The engine with Pallas kernels keeps and answers what it does with XLA."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

import kvjax
from kvjax import kernels
from kvjax.kernels import dispatch
from kvjax.model import Geometry
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel(
  Geometry.uniform(
    layers=1, heads=4, kv_heads=2, head_dim=128, max_positions=4096
  )
)
LENGTHS = (128, 101)
# Attention of GPUs is of 16 bits.
MODELS = {"tpu": MODEL, "gpu": dataclasses.replace(MODEL, dtype="bfloat16")}
INTERPRETED = {
  "tpu": lambda: pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()),
  "gpu": lambda: plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
}
# What serves besides selection, and copies on TPUs: on GPUs, XLA copies and
# reads listed slots as fast as a kernel.
ONLY_TPU = {"compact", "sparse_decode"}
OWN = {
  "keydiff": set(),
  "snapkv": {"causal_mass"},
  "h2o": {"causal_mass"},
  "compactor:chunk=128": {"sketch", "leverage_rows", "chunk_mass"},
  "adakv": {"causal_mass", "paged_attention"},
  "ctkvr": {"sparse_decode"},
}


def prompts():
  draw = np.random.default_rng(0)
  rows = [draw.integers(1, 64, n).tolist() for n in LENGTHS]
  return kvjax.Prompts.of(rows, max(LENGTHS))


def ran(model, plan):
  """Positions that are kept, and the answers."""
  params = model.init()
  plan = kvjax.get_plan(plan, kvjax.Tokens(40))
  cache, logits = kvjax.prefill(model, params, prompts(), plan)
  answers = kvjax.generate(model, params, cache, logits, kvjax.Decoding(2))
  kept = [kept_positions(cache, row) for row in range(len(LENGTHS))]
  return kept, answers.rows()


@pytest.fixture
def served(monkeypatch):
  """Names of operations that a kernel has served."""
  # Methods share programs, and what was traced before is not seen here.
  jax.clear_caches()
  names = set()

  def spy(kernel, *arguments, **options):
    result = on_mesh(kernel, *arguments, **options)
    names.add(kernel.func.__name__.removesuffix("_tpu").removesuffix("_gpu"))
    return result

  on_mesh = dispatch.on_mesh
  monkeypatch.setattr(dispatch, "on_mesh", spy)
  return names


@pytest.mark.parametrize("platform", MODELS)
@pytest.mark.parametrize("plan", OWN)
def test_kernels_keep_what_xla_keeps(platform, plan, served):
  model = MODELS[platform]
  with kernels.use("xla", platform):
    wanted = ran(model, plan)
  assert not served
  with INTERPRETED[platform](), kernels.use(platform=platform):
    found = ran(model, plan)
  assert found == wanted
  expected = {"largest", "compact"} | OWN[plan]
  if platform == "gpu":
    expected -= ONLY_TPU
    assert not served & ONLY_TPU
  assert expected <= served


def test_whole_prompts_attend_by_splash_attention():
  plan = kvjax.get_plan("streaming", kvjax.Tokens(40))
  with kernels.use(platform="tpu"):
    program = jax.make_jaxpr(
      lambda params: kvjax.prefill(MODEL, params, prompts(), plan)
    )(MODEL.init())
  assert "splash_mha_fwd" in str(program)
