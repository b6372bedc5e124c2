"""What every eviction method says of itself is what it does."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from contract_cases import CASES

import kvjax
from kvjax.allocation import (
  Adaptive,
  Middle,
  Pyramid,
  Uniform,
  WholeChunkCounts,
)
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.registry.names import get_recipe
from kvjax.registry.registry import METHODS
from kvjax.testing import checks


@pytest.mark.parametrize("name", METHODS)
class TestTraits:
  """What a method says of itself is what it does."""

  def test_blocks_are_refused_for_the_reason_that_is_given(self, name):
    recipe, method = CASES[name], CASES[name].method
    reason = method.traits.whole_prompts_only
    if recipe.allocation is not None:
      reason = "it shares it out once, when the prompt is known"
    for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=2)):
      with refused(reason):
        kvjax.Plan(
          method,
          kvjax.Retention(0.5),
          schedule=schedule,
          allocation=recipe.allocation,
        )

  def test_what_is_remembered_of_a_block_is_what_is_declared(self, name):
    method = CASES[name].method
    traits = method.traits
    if traits.whole_prompts_only:
      pytest.skip("it remembers nothing: it sees whole prompts")
    after = jax.eval_shape(
      lambda layer, seen: method.observe(layer, LayerCache.of(seen), seen),
      jnp.int32(2),
      checks.all_activations(0, [61, 96, 40], 96),
    )
    remembers = "h2o" in name or bool(traits.observes)
    assert (after.remembered is not None) == remembers
    assert (after.window is not None) == bool(traits.window)
    if traits.window:
      assert after.window.positions.shape == (3, traits.window)

  def test_uneven_budgets_are_refused_for_the_reason_that_is_given(self, name):
    method = CASES[name].method
    reason = method.traits.even
    if method.allocation.spreads_layers:
      reason = "layers unequal shares"
    with refused(reason):
      kvjax.Plan(
        method, kvjax.Tokens(20), allocation=Pyramid(method.allocation)
      )


def refused(reason):
  """A context that must be refused for a reason, or not if that is empty."""
  if not reason:
    return contextlib.nullcontext()
  return pytest.raises(InputError, match=re.escape(reason))


def test_what_spreads_a_budget_follows_the_options_of_the_method():
  spread = get_recipe("pyramid/ada/snapkv:window=5:alpha=0.1").allocation
  assert spread == Pyramid(Adaptive(Uniform(), 0.1))
  spread = get_recipe("pyramidkv:window=5:beta=3").allocation
  assert spread == Pyramid(Uniform(), 3.0)
  spread = get_recipe("pyramid/compactor.vllm:first=2:last=3").allocation
  assert spread == Pyramid(Middle(5, joint=True))
  spread = get_recipe("pyramid/chunkkv.kvpress/snapkv:chunk=7").allocation
  assert spread == Pyramid(WholeChunkCounts(7))
  for name in ("pyramid/keydiff:window=3", "pyramid/compactor:ends=4"):
    with pytest.raises(InputError, match="has no option"):
      get_recipe(name)
