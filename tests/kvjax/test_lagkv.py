"""LagKV against the loops of its paper in float64, and its length law."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation import LagLaw, Sizes
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods import LagKV, LayerBudget
from kvjax.registry.names import get_method
from kvjax.testing import random_activations

S, L = 3, 8


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def by_hand(keys, values, method, each):
  """Kept positions of one head, partition by partition."""
  n = len(keys)
  if n < S + 2 * L:
    return list(range(n))
  count = (n - S) // L
  kept = list(range(S))
  for p in range(count - 1):
    start = S + p * L
    total = np.zeros(L)
    for x, weight in ((keys, 1.0), (values, method.value_weight)):
      own = x[start : start + L]
      other = own if method.reference == "own" else x[start + L :][:L]
      low, high = other.min(axis=0), other.max(axis=0)
      scaled = (own - low) / np.maximum(high - low, 1e-6)
      total += weight * softmax(scaled.std(axis=1, ddof=method.ddof))
    order = sorted(range(L), key=lambda t: (-total[t], t))
    kept += sorted(start + t for t in order[:each])
  return kept + list(range(S + (count - 1) * L, n))


def length_after(method, budget, length):
  """Tokens that a row keeps."""
  sizes = Sizes((2,))
  return int(method.allocation.counts(budget, np.array([length]), sizes)[0, 0])


evaluate = jax.jit(
  lambda method, cache, seen: method.evaluate(jnp.int32(0), cache, seen),
  static_argnums=0,
)
select = jax.jit(lambda method, *args: method.select(*args), static_argnums=0)


def kept(method, seen, budget, lengths):
  """Positions that the rows keep, per head."""
  counts = [length_after(method, budget, n) for n in lengths]
  cache = LayerCache.of(seen)
  scores = evaluate(method, cache, seen)
  most = LayerBudget(jnp.asarray(counts, jnp.int32), cache.capacity)
  slots = np.asarray(select(method, scores, cache, most))
  for row, count in enumerate(counts):
    assert np.all(np.sum(slots[row] >= 0, axis=-1) == count)
  positions = np.asarray(cache.positions)
  return [
    [
      own[slots[row, head][slots[row, head] >= 0]].tolist()
      for head, own in enumerate(positions[row])
    ]
    for row in range(len(lengths))
  ]


@pytest.mark.parametrize(
  "method",
  [
    LagKV(S, L),
    LagKV(S, L, value_weight=0.0),
    LagKV(S, L, ddof=0, reference="own"),
  ],
  ids=["paper", "keys only", "local"],
)
def test_keeps_what_the_paper_keeps(method):
  lengths = [18, 19, 43, 60]
  seen = random_activations(0, lengths, 64)
  ours = kept(method, seen, kvjax.Retention(0.5), lengths)
  for row, n in enumerate(lengths):
    for head in range(2):
      keys, values = (
        np.asarray(x[row, head, :n], np.float64)
        for x in (seen.keys, seen.values)
      )
      assert ours[row][head] == by_hand(keys, values, method, L // 2)


@pytest.mark.parametrize("share", [0.5, 0.25, 0.167, 0.125])
@pytest.mark.parametrize("lag", [128, 512, 1024])
def test_length_law(share, lag):
  method = LagKV(16, lag)
  for n in range(1, 4 * lag + 40, 37):
    each = int(share * lag + 1e-9)
    length, base = n, 16
    while length >= base + 2 * lag:  # one recursion after another
      length -= lag - each
      base += each
    assert length_after(method, kvjax.Retention(share), n) == length


def test_paper_table_of_tokens_per_partition():
  tokens = {
    lag: [int(r * lag + 1e-9) for r in (0.5, 0.25, 0.167, 0.125)]
    for lag in (128, 512, 1024)
  }
  for lag, expected in tokens.items():
    method = LagKV(16, lag)
    whole = 16 + 3 * lag
    got = [
      (length_after(method, kvjax.Retention(r), whole) - 16 - lag) // 2
      for r in (0.5, 0.25, 0.167, 0.125)
    ]
    assert got == expected


def test_a_budget_in_tokens_is_met_to_half_a_token_per_partition():
  method = LagKV(16, 128)
  for n in (1000, 2048, 5000):
    for budget in (400, 700):
      off = abs(length_after(method, kvjax.Tokens(budget), n) - budget)
      assert off <= ((n - 16) // 128 - 1) / 2


@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
def test_a_retention_of_the_row_is_met_to_half_a_token_per_partition(share):
  law = LagLaw(16, 32, of_row=True)
  lengths = np.arange(500, 1100)
  kept = law.counts(kvjax.Retention(share), lengths, Sizes((2,)))[0]
  scored = (lengths - 16) // 32 - 1
  # Sinks and the sliding window are never evicted.
  wanted = np.maximum(np.ceil(share * lengths), lengths - scored * 32)
  assert (np.abs(kept - wanted) <= scored / 2).all()
  assert (
    kept != LagLaw(16, 32).counts(kvjax.Retention(share), lengths, Sizes((2,)))
  ).any()


def test_a_retention_of_the_row_is_for_whole_prompts():
  method = kvjax.get_method("lagkv:lag=8:retention_of=row")
  with pytest.raises(kvjax.InputError, match="retention_of=partition"):
    kvjax.Plan(method, kvjax.Retention(0.5), schedule=kvjax.Schedule(every=2))
  model = kvjax.testing.TinyModel()
  prompts = kvjax.Prompts.of([list(range(60)) * 2, list(range(64))])
  plan = kvjax.Plan(method, kvjax.Retention(0.5))
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  assert np.abs(cache.lengths[0] - np.array([[60], [32]])).max() <= 6


def test_a_channel_without_range_stays_finite():
  seen = random_activations(1, [64], 64)
  flat = seen.keys.at[..., 3].set(1.0)
  seen = dataclasses.replace(seen, keys=flat)
  scores = evaluate(LagKV(S, L), LayerCache.of(seen), seen)
  assert np.all(np.isfinite(scores))


def test_a_partition_ignores_all_but_the_next():
  seen = random_activations(2, [S + 4 * L], S + 4 * L)
  changed = seen.keys.at[:, :, S + 2 * L :].multiply(5.0)
  other = dataclasses.replace(seen, keys=changed)
  method = LagKV(S, L)
  one, two = (
    np.asarray(evaluate(method, LayerCache.of(x), x)) for x in (seen, other)
  )
  np.testing.assert_array_equal(one[:, :, 0], two[:, :, 0])
  assert np.any(one[:, :, 1] != two[:, :, 1])


def test_scale_of_keys_does_not_matter():
  seen = random_activations(3, [60], 64)
  scaled = dataclasses.replace(seen, keys=seen.keys * 4)
  budget = kvjax.Retention(0.5)
  one, two = (kept(LagKV(S, L), x, budget, [60]) for x in (seen, scaled))
  assert one == two


def test_kvpress_mode_keeps_the_budget_and_the_window():
  method = LagKV(S, L, mode="kvpress")
  n = 60
  seen = random_activations(4, [n], 64)
  (row,) = kept(method, seen, kvjax.Tokens(30), [n])
  window = S + ((n - S) // L - 1) * L
  for head in row:
    assert len(head) == 30
    assert set(range(S)) | set(range(window, n)) <= set(head)


def test_kvpress_mode_evicts_short_rows_by_age():
  method = LagKV(S, L, mode="kvpress")
  seen = random_activations(5, [15], 16)
  (row,) = kept(method, seen, kvjax.Tokens(8), [15])
  assert row[0] == [0, 1, 2, 10, 11, 12, 13, 14]


def test_kvpress_mode_prefers_the_earlier_of_equal_tokens():
  n, method = S + 5 * L, LagKV(S, L, mode="kvpress")
  seen = random_activations(6, [n], n)
  same = dataclasses.replace(
    seen, keys=jnp.ones_like(seen.keys), values=jnp.ones_like(seen.values)
  )
  fixed = S + L
  (row,) = kept(method, same, kvjax.Tokens(fixed + 2 * 4), [n])
  first = [S + p * L + t for p in range(4) for t in range(2)]
  assert row[0] == [*range(S), *first, *range(n - L, n)]


def test_presets_are_the_papers():
  assert get_method("lagkv.paper") == LagKV(sinks=16, lag=1024)
  with pytest.raises(InputError, match="lag must be 2 or more"):
    LagKV(lag=1)
