"""The engine with Pallas kernels keeps and answers what it does with XLA."""

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import kernels
import kvjax
from kvjax.model import Geometry
from kvjax.testing import TinyModel, held_positions

MODEL = TinyModel(
  Geometry(layers=1, heads=4, kv_heads=2, head_dim=128, max_positions=4096)
)
LENGTHS = (128, 101)
PLANS = (
  "h2o",
  "compactor:chunk=64",
  "adakv",
  "ctkvr",
  pytest.param("keydiff", marks=pytest.mark.slow),
)


def prompts():
  draw = np.random.default_rng(0)
  rows = [draw.integers(1, 64, n).tolist() for n in LENGTHS]
  return kvjax.Prompts.of(rows, max(LENGTHS))


def ran(plan):
  """Positions that are kept, and the answers."""
  params = MODEL.init()
  plan = kvjax.get_plan(plan, kvjax.Tokens(40))
  cache, logits = kvjax.prefill(MODEL, params, prompts(), plan)
  answers = kvjax.complete(MODEL, params, cache, logits, kvjax.Decoding(2))
  kept = [held_positions(cache, row) for row in range(len(LENGTHS))]
  return kept, answers.rows()


@pytest.mark.parametrize("plan", PLANS)
def test_kernels_keep_what_xla_keeps(plan, monkeypatch):
  called = []

  def pallas_call(*arguments, name=None, **options):
    called.append(name)
    return pl_call(*arguments, name=name, **options)

  pl_call = pl.pallas_call
  monkeypatch.setattr(pl, "pallas_call", pallas_call)
  with kernels.use("xla", "tpu"):
    wanted = ran(plan)
  assert not called
  with (
    pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()),
    kernels.use(platform="tpu"),
  ):
    found = ran(plan)
  assert found == wanted
  assert len(set(called)) >= 2, called


def test_whole_prompts_attend_by_splash_attention():
  plan = kvjax.get_plan("streaming", kvjax.Tokens(40))
  with kernels.use(platform="tpu"):
    program = jax.make_jaxpr(
      lambda params: kvjax.prefill(MODEL, params, prompts(), plan)
    )(MODEL.init())
  assert "splash_mha_fwd" in str(program)
