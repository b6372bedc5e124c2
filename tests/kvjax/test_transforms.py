"""Gradients, debugging modes and donation, as users of JAX expect them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel()
PROMPTS = kvjax.Prompts.of([[*range(1, 30)], [*range(3, 20)]])
PLANS = [
  kvjax.get_plan(name, kvjax.Tokens(20)) for name in ("keydiff", "kvzip")
]


@pytest.fixture(scope="module")
def params():
  return MODEL.init()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.label)
def test_gradients_outside_of_jit_are_those_inside(params, plan):
  """The layers' hidden states are needed again, so none may be donated."""

  def loss(params, plan):
    _, logits = kvjax.prefill(MODEL, params, PROMPTS, plan)
    return jnp.sum(jnp.square(logits))

  of_plan = functools.partial(loss, plan=plan)
  inside = jax.jit(jax.grad(of_plan))(params)
  # Where `jax.checkpoint` runs the layers again, it does so one by one.
  for outside in (of_plan, jax.checkpoint(of_plan)):
    for found, expected in zip(
      *map(jax.tree.leaves, (jax.grad(outside)(params), inside)), strict=True
    ):
      # Two NaNs would pass for equal.
      assert np.isfinite(expected).all()
      np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_heads_that_share_a_budget_keep_the_same_within_jit(params):
  """The pool depends on the budget alone, so that its shapes are known."""
  outside, _ = kvjax.prefill(MODEL, params, PROMPTS, PLANS[1])
  prefill = jax.jit(lambda p: kvjax.prefill(MODEL, p, PROMPTS, PLANS[1]))
  inside, _ = prefill(params)
  assert [leaf.shape for leaf in jax.tree.leaves(inside)] == [
    leaf.shape for leaf in jax.tree.leaves(outside)
  ]
  for row in range(2):
    kept = [kept_positions(cache, row) for cache in (inside, outside)]
    assert kept[0] == kept[1]
  counts = np.unique(outside.lengths)
  assert len(counts) > 1


@pytest.mark.parametrize("method", ["keydiff", "ada/keydiff"])
def test_gradients_reach_caches_that_grow_on_a_mesh(params, method):
  """Positions have no gradient: they are no tracers there."""
  plan = kvjax.get_plan(method, kvjax.Tokens(12))

  def loss(params):
    cache, _ = kvjax.prefill(MODEL, params, PROMPTS, plan)
    arrays = jax.tree.leaves(kvjax.reserve(cache, 5))
    return sum(
      jnp.sum(jnp.square(array))
      for array in arrays
      if jnp.issubdtype(array.dtype, jnp.floating)
    )

  expected = jax.grad(loss)(params)
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    found = jax.grad(loss)(params)
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert np.isfinite(other).all()
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["keydiff", "ada/keydiff", "kvzip:level=head"])
def test_prefills_of_several_models_are_mapped(name, params):
  """No stack is donated, whose arrays the mapped ones could not take."""
  plan = kvjax.get_plan(name, kvjax.Tokens(20))

  def run(params):
    return kvjax.prefill(MODEL, params, PROMPTS, plan)

  models = [params, MODEL.init(1)]
  mapped = jax.vmap(run)(jax.tree.map(lambda *x: jnp.stack(x), *models))
  for number, of_model in enumerate(models):
    leaves = zip(*map(jax.tree.leaves, (mapped, run(of_model))), strict=True)
    for found, expected in leaves:
      np.testing.assert_allclose(found[number], expected, rtol=1e-3, atol=1e-4)


def test_weights_may_be_on_another_device_than_the_default(params):
  """Stacks are allocated there, where the keys that they take are."""
  device = jax.devices()[2]
  placed = jax.device_put(params, device)
  cache, logits = kvjax.prefill(MODEL, placed, PROMPTS, PLANS[0])
  expected = kvjax.prefill(MODEL, params, PROMPTS, PLANS[0])
  assert all(x.devices() == {device} for x in jax.tree.leaves(cache.stacks))
  for one, other in zip(
    *map(jax.tree.leaves, ((cache, logits), expected)), strict=True
  ):
    np.testing.assert_array_equal(one, other)


def test_no_array_of_a_prefill_is_taken_for_a_fault(params):
  with jax.debug_nans(True):
    _, logits = kvjax.prefill(MODEL, params, PROMPTS, PLANS[0])
  assert np.isfinite(logits).all()


def test_caches_share_no_array_with_each_other_or_the_prompts(params):
  """Each of them may be donated, by `generate(keep=True)`."""
  protected = np.zeros(PROMPTS.tokens.shape, bool)
  protected[:, :2] = True
  prompts = kvjax.Prompts(
    jnp.asarray(PROMPTS.tokens), jnp.asarray(PROMPTS.lengths), protected
  )
  plans = [
    kvjax.get_plan("keydiff", kvjax.Tokens(n), schedule=kvjax.Schedule(every=1))
    for n in (20, 24)
  ]
  caches, _ = kvjax.sweep(MODEL, params, prompts, plans)
  leaves = jax.tree.leaves((caches, prompts.tokens, prompts.lengths))
  places = [x.unsafe_buffer_pointer() for x in leaves if x.size]
  assert len(set(places)) == len(places)
