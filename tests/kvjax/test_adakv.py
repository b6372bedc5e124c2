"""AdaKV's head budgets against float64 loops, and the laws it keeps."""

import dataclasses
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation import Adaptive, Sizes, Uniform
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods import (
  Compactor,
  KeyDiff,
  KeyL2Norm,
  LayerBudget,
  ScoringMethod,
  SnapKV,
)
from kvjax.registry.registry import Recipe
from kvjax.selection import head_counts, top_slots
from kvjax.testing import random_activations

LENGTHS = [61, 96, 40]
PADDED = 96


@dataclasses.dataclass(frozen=True)
class Coarse(ScoringMethod):
  """Scores with many ties, some not finite; one head has most of the best."""

  first: int = 3

  def scores(self, layer, cache, activations):
    tilt = jnp.arange(cache.keys.shape[1], dtype=jnp.float32)[None, :, None]
    scores = jnp.round(2 * cache.keys[..., 0].astype(jnp.float32) + tilt)
    return jnp.where(scores == 0, jnp.nan, scores)

  def protected(self, cache, counts):
    return (cache.positions >= 0) & (cache.positions < self.first)


INNERS = [
  SnapKV(window=8, kernel=3),
  SnapKV(window=32, kernel=7, pooling="max"),
  KeyDiff(recent_frac=0.2),
  KeyL2Norm(),
  Coarse(),
]
# What these show hardly depends on who scores.
FEW = [
  pytest.param(inner, marks=() if i in (1, 4) else pytest.mark.slow)
  for i, inner in enumerate(INNERS)
]


def ada(inner, alpha=0.2, normalize=False):
  return Recipe(inner, Adaptive(Uniform(), alpha, normalize))


@functools.partial(jax.jit, static_argnames=("recipe", "capacity"))
def selected(recipe, seen, counts, capacity):
  method, allocation = recipe.method, recipe.allocation or Uniform()
  cache = LayerCache.of(seen)
  found = allocation.evaluate(method, jnp.int32(2), cache, seen)
  budget = LayerBudget(counts, capacity)
  return allocation.select(method, found, cache, budget)


def slots_of(recipe, seen, counts, capacity=PADDED):
  """Slots kept per row and head, as lists."""
  slots = selected(recipe, seen, jnp.asarray(counts, jnp.int32), capacity)
  return [
    [[int(s) for s in head if s >= 0] for head in row]
    for row in np.asarray(slots)
  ]


@functools.partial(jax.jit, static_argnames="method")
def scores_of(method, seen):
  return method.evaluate(jnp.int32(2), LayerCache.of(seen), seen)


def by_hand(recipe, seen, counts):
  """One row after another, in float64, by Python's sort."""
  cache = LayerCache.of(seen)
  scores = np.asarray(scores_of(recipe.method, seen), np.float64)
  counts = np.asarray(counts, np.int32)
  each = jnp.asarray(counts)[:, None]
  guarded = np.asarray(recipe.method.protected(cache, each))
  valid = np.asarray(cache.positions) >= 0
  return [
    _row(recipe.allocation, *row)
    for row in zip(scores, valid, guarded, counts, strict=True)
  ]


def _row(allocation, scores, valid, guarded, budget):
  worth = np.where(np.isfinite(scores), scores, -np.inf)
  heads = range(len(scores))
  window = [np.flatnonzero(valid[j] & guarded[j])[-budget:] for j in heads]
  ranked = [
    sorted(
      np.flatnonzero(valid[j] & ~guarded[j]), key=lambda t, j=j: -worth[j, t]
    )
    for j in heads
  ]
  even = [min(budget, int(valid[j].sum())) - len(window[j]) for j in heads]
  scale = np.ones(len(scores))
  if allocation.normalize:
    for j in heads:
      own = scores[j, ranked[j]]
      scale[j] = own[: even[j]].sum() / own.sum()
  pairs = [(-scale[j] * worth[j, t], t, j) for j in heads for t in ranked[j]]
  winners = [j for _, _, j in sorted(pairs)[: sum(even)]]
  alpha = Fraction(str(allocation.alpha))
  share = [(1 - alpha) * winners.count(j) + alpha * even[j] for j in heads]
  due = [int(x) for x in share]
  order = sorted(
    (j for j in heads if share[j] > due[j]),
    key=lambda j: (
      due[j] - share[j],
      -scale[j] * worth[j, ranked[j][due[j]]],
      j,
    ),
  )
  for j in order[: sum(even) - sum(due)]:
    due[j] += 1
  return [
    sorted(int(t) for t in (*window[j], *ranked[j][: due[j]])) for j in heads
  ]


@pytest.mark.parametrize(
  ("inner", "alpha", "kv_heads"),
  [
    (inner, [0.0, 0.2, 0.5, 0.123][(i + j) % 4], [3, 1, 5][(i + 2 * j) % 3])
    for i, inner in enumerate(INNERS)
    for j in range(2)
  ],
)
def test_equals_a_loop(inner, alpha, kv_heads):
  recipe = ada(inner, alpha)
  seen = random_activations(
    0, LENGTHS, PADDED, heads=2 * kv_heads, kv_heads=kv_heads
  )
  for counts in ([20, 33, 40], [1, 9, 17], [61, 95, 2]):
    assert slots_of(recipe, seen, counts) == by_hand(recipe, seen, counts)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_normalized_equals_a_loop(alpha):
  method = SnapKV(window=8, kernel=3)
  recipe = ada(method, alpha, normalize=True)
  seen = random_activations(1, LENGTHS, PADDED, heads=6, kv_heads=3)
  counts = [20, 33, 38]
  kept = slots_of(recipe, seen, counts)
  assert kept == by_hand(recipe, seen, counts)
  assert kept != slots_of(ada(method, alpha), seen, counts)


@pytest.mark.parametrize("inner", INNERS, ids=repr)
def test_keeps_its_budget_and_what_is_protected(inner):
  recipe = ada(inner)
  seen = random_activations(2, LENGTHS, PADDED, heads=6, kv_heads=3)
  cache = LayerCache.of(seen)
  for counts in ([25, 20, 39], [61, 50, 1]):
    each = jnp.asarray(counts)[:, None]
    guarded = np.asarray(inner.protected(cache, each))
    kept = slots_of(recipe, seen, counts)
    for row, heads in enumerate(kept):
      assert sum(map(len, heads)) == 3 * counts[row]
      for head, slots in enumerate(heads):
        assert slots == sorted(set(slots))
        assert all(0 <= slot < LENGTHS[row] for slot in slots)
        must = np.flatnonzero(guarded[row, head])[-counts[row] :]
        assert set(must.tolist()) <= set(slots)


def test_heads_differ():
  seen = random_activations(3, LENGTHS, PADDED, heads=6, kv_heads=3)
  sizes = [len(head) for head in slots_of(ada(Coarse()), seen, [20] * 3)[0]]
  assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("inner", FEW, ids=repr)
def test_a_whole_share_of_alpha_is_the_inner_method(inner):
  seen = random_activations(4, LENGTHS, PADDED, heads=6, kv_heads=3)
  counts = jnp.asarray([7, 30, 40], jnp.int32)
  np.testing.assert_array_equal(
    selected(ada(inner, alpha=1.0), seen, counts, 40),
    selected(Recipe(inner), seen, counts, 40),
  )


@pytest.mark.parametrize("inner", INNERS, ids=repr)
def test_a_budget_of_the_row_keeps_the_row(inner):
  seen = random_activations(5, LENGTHS, PADDED, heads=6, kv_heads=3)
  kept = slots_of(ada(inner), seen, [61, 30, 77])
  assert kept[0] == [list(range(61))] * 3
  assert kept[2] == [list(range(40))] * 3


def test_normalized_heads_and_permuted_heads():
  order = np.array([2, 0, 1])
  seen = random_activations(6, LENGTHS, PADDED, heads=6, kv_heads=3)
  queries = np.concatenate([[2 * k, 2 * k + 1] for k in order])
  turned = dataclasses.replace(
    seen,
    queries=seen.queries[:, queries],
    keys=seen.keys[:, order],
    values=seen.values[:, order],
    keys_unrotated=seen.keys_unrotated[:, order],
  )
  for recipe in (
    ada(SnapKV(window=8), 0.0),
    ada(KeyDiff(), 0.37),
    ada(KeyDiff(), 0.37, normalize=True),
  ):
    for count in (12, 13, 14, 15):
      plain, permuted = (
        slots_of(recipe, x, [count] * 3) for x in (seen, turned)
      )
      assert [[row[k] for k in order] for row in plain] == permuted


@pytest.mark.parametrize("inner", FEW, ids=repr)
def test_a_row_stands_alone(inner):
  recipe = ada(inner)
  seen = random_activations(7, LENGTHS, PADDED, heads=6, kv_heads=3)
  together = slots_of(recipe, seen, [15, 25, 10])
  for row, count in ((0, 15), (2, 10)):

    def cut(x, row=row):
      x = np.asarray(x)[row : row + 1]
      return jnp.asarray(x[:, :62] if x.ndim == 2 else x[:, :, :62])

    alone = jax.tree.map(cut, seen)
    assert slots_of(recipe, alone, [count], 30) == [together[row]]


@pytest.mark.slow
def test_jit_equals_eager():
  recipe = ada(SnapKV(window=8), normalize=True)
  seen = random_activations(8, LENGTHS, PADDED, heads=6, kv_heads=3)
  counts = jnp.asarray([10, 20, 30], jnp.int32)
  np.testing.assert_array_equal(
    selected.__wrapped__(recipe, seen, counts, 30),
    selected(recipe, seen, counts, 30),
  )


def test_slots_are_as_many_as_one_head_can_have():
  # One head's scores are above all others: it wins every slot.
  @dataclasses.dataclass(frozen=True)
  class Last(ScoringMethod):
    def scores(self, layer, cache, activations):
      heads = jnp.arange(cache.keys.shape[1], dtype=jnp.float32)
      return jnp.broadcast_to(heads[None, :, None], cache.positions.shape)

  seen = random_activations(9, [90], PADDED, heads=3, kv_heads=3)

  def slots(recipe, count):
    return selected(recipe, seen, jnp.asarray([count], jnp.int32), count)

  found = slots(ada(Last(), 0.25), 20)
  assert found.shape == (1, 3, 50)  # 0.75 * 60 + 0.25 * 20
  assert np.sum(found >= 0, axis=-1).tolist() == [[5, 5, 50]]
  # No more than there are slots.
  assert slots(ada(Last(), 0), 80).shape == (1, 3, PADDED)


@pytest.mark.parametrize(("K", "T"), [(1, 1), (3, 16), (4, 23)])
def test_head_counts_equal_a_sort(K, T):
  rng = np.random.default_rng(10 * K + T)
  B = 8
  scores = rng.integers(-2, 3, (B, K, T)).astype(np.float32)  # many ties
  odd = rng.choice([np.nan, np.inf, -np.inf], (B, K, T))
  scores = np.where(rng.random((B, K, T)) < 0.1, odd, scores)
  candidates = rng.random((B, K, T)) < 0.8
  totals = rng.integers(0, K * T + 3, B).astype(np.int32)
  counts = np.asarray(jax.jit(head_counts)(scores, candidates, totals))
  slots = top_slots(
    jnp.asarray(scores),
    jnp.asarray(candidates),
    jnp.zeros((B, K, T), bool),
    jnp.asarray(counts),
    T,
  )
  for b in range(B):
    worth = np.where(np.isnan(scores[b]), -np.inf, scores[b])
    pairs = [
      (-worth[k, t], t, k)
      for k in range(K)
      for t in range(T)
      if candidates[b, k, t]
    ]
    best = sorted(pairs)[: totals[b]]
    for k in range(K):
      own = sorted(t for _, t, head in best if head == k)
      assert counts[b, k] == len(own)
      assert [int(t) for t in slots[b, k] if t >= 0] == own


def test_budgets_are_the_inner_methods():
  allocation, sizes = Adaptive(Uniform()), Sizes((3, 5))
  for budget in (kvjax.Tokens(20), kvjax.Retention(0.3)):
    count, most = budget.num_kept(90), budget.num_kept(96)
    length = np.array([90])
    assert allocation.counts(budget, length, sizes).tolist() == [[count]] * 2
    totals = allocation.totals(budget, length, sizes)
    assert totals.tolist() == [[3 * count], [5 * count]]
    assert allocation.capacities(budget, 96, sizes).tolist() == [most] * 2


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_an_alpha_that_is_no_share_is_refused(alpha):
  with pytest.raises(InputError, match="alpha must be between 0 and 1"):
    Adaptive(Uniform(), alpha)


def test_a_method_without_scores_or_window_is_refused():
  with pytest.raises(
    InputError, match=r"final before .* compactor has neither"
  ):
    kvjax.get_plan("ada/compactor", kvjax.Tokens(9))
  for method in (Compactor(), Compactor(spread="layer")):
    with pytest.raises(InputError, match="compactor has neither"):
      kvjax.Plan(method, kvjax.Tokens(9), allocation=Adaptive(Uniform()))


@pytest.mark.parametrize(
  "inner", ["lagkv", "full", "pyramidkv", "key_norm:skip_layers=0"]
)
def test_what_has_no_budget_to_spread_is_refused(inner):
  with pytest.raises(InputError, match="cannot be spread unevenly"):
    kvjax.get_plan(f"ada/{inner}", kvjax.Tokens(9))


@pytest.mark.parametrize(
  "name",
  [
    "protokv:window=6:prototypes=20:score=attn_mean:cut=position",
    "chunkkv:window=6:chunk=4:scope=head",
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ("protokv:window=6:prototypes=20", "chunkkv:window=6:chunk=1")
    ),
  ],
)
def test_clusters_and_chunks_get_the_shares_of_snapkv(name):
  """Each head keeps what the inner method keeps with that head's count."""
  inner = kvjax.get_method(name)
  recipe = ada(inner)
  votes = ada(SnapKV(window=6, kernel=7, pooling="max"))
  seen = random_activations(6, LENGTHS, PADDED, heads=6, kv_heads=3)
  counts = [25, 20, 33]
  kept, shares = slots_of(recipe, seen, counts), slots_of(votes, seen, counts)
  for row, heads in enumerate(shares):
    assert len({len(head) for head in heads}) > 1
    for head, share in enumerate(heads):
      alone = slots_of(Recipe(inner), seen, [len(share)] * 3, PADDED)
      assert kept[row][head] == alone[row][head]


def test_blocks_are_refused():
  with pytest.raises(InputError, match="adakv cannot spread a budget block by"):
    kvjax.get_plan("adakv", kvjax.Tokens(9), schedule=kvjax.Schedule(block=8))
