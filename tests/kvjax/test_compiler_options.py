"""Options of the compiler for decoding, which GPUs have."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax import kernels
from kvjax.engine import generate as generating
from kvjax.engine.compiler_options import decoding_options
from kvjax.model import Geometry
from kvjax.testing import TinyModel

MODEL = TinyModel(
  Geometry.uniform(layers=2, heads=2, kv_heads=1, head_dim=8, max_positions=64)
)
PROMPTS = kvjax.Prompts.of([[3, 4, 5, 6], [7, 8, 9, 3]])
DECODING = kvjax.Decoding(3)


def prefilled(params):
  plan = kvjax.get_plan("streaming", kvjax.Tokens(3))
  cache, logits = kvjax.prefill(MODEL, params, PROMPTS, plan)
  return kvjax.reserve(cache, 3), logits


@pytest.fixture
def given(monkeypatch):
  """Options of the programs that are made."""
  found, jit = [], jax.jit

  def spy(function, **arguments):
    found.append(arguments.get("compiler_options"))
    return jit(function, **arguments)

  generating._with_options.cache_clear()
  monkeypatch.setattr(generating.jax, "jit", spy)
  yield found
  generating._with_options.cache_clear()


@pytest.mark.parametrize("keep", [False, True])
def test_a_gpu_decodes_with_options_and_donates_what_is_kept(given, keep):
  params = MODEL.init()
  with kernels.use("xla", "cpu"):
    assert decoding_options() is None
    wanted = kvjax.generate(
      MODEL, params, *prefilled(params), DECODING, keep=keep
    )
  assert not [one for one in given if one]
  with kernels.use("xla", "gpu"):
    cache, logits = prefilled(params)
    found = kvjax.generate(MODEL, params, cache, logits, DECODING, keep=keep)
    assert [one for one in given if one] == [decoding_options()]
    assert "xla_gpu_enable_triton_gemm" in decoding_options()
  np.testing.assert_array_equal(found.tokens, wanted.tokens)
  deleted = [leaf.is_deleted() for leaf in jax.tree.leaves(cache.stacks)]
  assert any(deleted) == keep


def test_what_is_generated_within_jit_has_the_options_of_that():
  params = MODEL.init()
  cache, logits = prefilled(params)
  wanted = kvjax.generate(MODEL, params, cache, logits, DECODING)
  with kernels.use("xla", "gpu"):
    found = jax.jit(
      lambda params: (
        kvjax.generate(MODEL, params, cache, logits, DECODING).tokens
      )
    )(params)
  np.testing.assert_array_equal(found, wanted.tokens)
