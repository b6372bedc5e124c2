"""Budgets that heads share: what they keep together, and what is protected."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation import Sizes, WholeLayer, WholeModel
from kvjax.allocation.whole_layer import count_best
from kvjax.errors import InputError
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel(kvjax.Geometry.uniform(3, 4, 2, 8, 4096))
DRAW = np.random.default_rng(0)
PROMPTS = kvjax.Prompts.of([DRAW.integers(0, 64, n).tolist() for n in (45, 7)])


def test_levels_share_budgets_among_other_heads():
  def lengths(level):
    plan = kvjax.get_plan(f"kvzip:level={level}", kvjax.Retention(0.5))
    cache, _ = kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan)
    return np.asarray(cache.lengths)[:, 0]

  assert (lengths("head") == 23).all()
  assert (lengths("layer").sum(axis=1) == 46).all()
  assert lengths("layer").std() > 0
  assert lengths("model").sum() == 6 * 23
  assert lengths("model").sum(axis=1).std() > 0


def test_kvpress_counts_what_it_removes():
  spread, sizes = WholeModel(), Sizes((2, 3, 2))
  lengths = np.array([61, 173, 1])
  for share in (0.1, 0.25, 0.47):
    budget = kvjax.Retention(share, rounding="kvpress")
    totals = spread.totals(budget, lengths, sizes).sum(axis=0)
    expected = [7 * n - int(7 * n * (1 - share)) for n in lengths]
    assert totals.tolist() == expected
    up = spread.totals(kvjax.Retention(share), lengths, sizes).sum(axis=0)
    assert up.tolist() == [7 * int(np.ceil(share * n)) for n in lengths]
    by_layer = WholeLayer().totals(budget, lengths, sizes)
    expected = [
      [K * n - int(K * n * (1 - share)) for n in lengths] for K in sizes.heads
    ]
    assert by_layer.tolist() == expected
    counts = WholeLayer().counts(budget, lengths, sizes)
    assert (counts == counts[0]).all()
    assert (counts * np.array(sizes.heads)[:, None] >= by_layer).all()


@pytest.mark.parametrize(
  "name", ["kvzip.kvpress:sinks=1", "compactor:spread=layer"]
)
def test_padding_does_not_change_what_a_large_budget_keeps(name):
  """Where the mean of the heads, rounded up, is the whole prompt."""
  model = TinyModel(kvjax.Geometry.uniform(2, 16, 8, 8, 4096))
  row = np.random.default_rng(0).permutation(64)[:40].tolist()
  plan = kvjax.get_plan(name, kvjax.Retention(0.99))

  def kept(padded):
    prompts = kvjax.Prompts.of([row], padded=padded)
    cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
    return kept_positions(cache, 0)

  assert sum(len(head) for layer in kept(64) for head in layer) < 2 * 8 * 40
  assert kept(64) == kept(128)


@pytest.mark.parametrize("level", ["model", "layer"])
def test_more_than_all_heads_together_keep_is_not_protected(level):
  budget = kvjax.Retention(0.1, rounding="kvpress")
  plan = kvjax.get_plan(f"kvzip.kvpress:level={level}", budget)

  def prefill(protected):
    mask = [n >= 61 - protected for n in range(61)]
    prompts = kvjax.Prompts.of([list(range(61))], protected=[mask])
    return kvjax.prefill(MODEL, MODEL.init(), prompts, plan)[0]

  with pytest.raises(
    InputError, match="7 tokens of a prompt are protected and"
  ):
    prefill(7)
  for layer in kept_positions(prefill(6), 0):
    assert all({*range(55, 61)} <= {*head} for head in layer)


def test_protected_slots_alone_fill_a_budget_that_heads_do_not_divide():
  scores = jnp.zeros((1, 3, 4))
  all_of_them = jnp.ones(scores.shape, bool)
  totals = jnp.asarray([11], jnp.int32)
  counts = count_best(scores, all_of_them, all_of_them, totals)
  assert counts.tolist() == [[4, 4, 3]]


def test_a_share_of_all_heads_is_what_each_may_protect():
  """5 of 9 tokens of three heads are 15, and half of all are 14."""
  plan = kvjax.get_plan(
    "compactor.vllm:first=0:last=0:chunk=9", kvjax.Retention(0.5)
  )
  model = TinyModel(kvjax.Geometry.uniform(2, 6, 3, 8, 4096))
  mask = [n < 5 for n in range(9)]
  prompts = kvjax.Prompts.of([list(range(9))], protected=[mask])
  with pytest.raises(InputError, match="5 tokens of a prompt are protected"):
    kvjax.prefill(model, model.init(), prompts, plan)


def test_too_many_protected_slots_share_the_budget():
  scores = jnp.asarray([[[1.0, 2.0, 3.0, 4.0], [8.0, 7.0, 6.0, 5.0]]])
  valid = jnp.ones(scores.shape, bool)
  protected = jnp.asarray([[[True, True, True, False], [False] * 4]])
  counts = count_best(scores, valid, protected, jnp.asarray([4], jnp.int32))
  assert counts.tolist() == [[2, 2]]


@pytest.mark.parametrize(
  ("share", "total"), [(0.4, [[36, 36]]), (0.75, [[65, 36]])], ids=str
)
def test_ends_that_always_stay_are_in_the_total(share, total):
  """As many as a share of the middle of 43 tokens, or as the ends have."""
  name = "compactor.vllm:sketch_dim=6:chunk=16:first=2:last=16"
  plan = kvjax.get_plan(name, kvjax.Retention(share))
  lengths = np.array([61, 40])
  sizes = Sizes((2,))
  found = plan.spread.totals(plan.fixed_budget, lengths, sizes)
  assert found.tolist() == total
  prompts = kvjax.Prompts.of([list(range(61)), list(range(40))])
  model = TinyModel()
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  assert np.sum(np.asarray(cache.lengths[0]), axis=1).tolist() == total[0]
