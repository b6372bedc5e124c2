"""Kept slots against a plain sort."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.options.budgets import Retention, Tokens
from kvjax.selection import age, floor_share, top_slots


def by_hand(scores, valid, protected, count):
  """One head, by Python's sort."""
  guarded = [i for i in range(len(scores)) if valid[i] and protected[i]]
  rest = [i for i in range(len(scores)) if valid[i] and not protected[i]]
  worth = [-np.inf if np.isnan(s) else s for s in scores]
  rest.sort(key=lambda i: (-worth[i], i))
  kept = guarded[-count:] if len(guarded) >= count else guarded + rest
  return sorted(kept[:count])


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_sort(seed):
  rng = np.random.default_rng(seed)
  B, K, T = 3, 2, int(rng.integers(3, 40))
  scores = rng.integers(-3, 4, (B, K, T)).astype(np.float32)  # many ties
  scores[rng.random((B, K, T)) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
  valid = rng.random((B, K, T)) < 0.8
  protected = rng.random((B, K, T)) < rng.choice([0.0, 0.2, 0.9])
  counts = rng.integers(1, T + 1, B).astype(np.int32)
  slots = jax.jit(top_slots, static_argnums=4)(
    scores, valid, protected, counts, int(counts.max())
  )
  for b in range(B):
    for k in range(K):
      ours = [int(i) for i in slots[b, k] if i >= 0]
      expected = by_hand(scores[b, k], valid[b, k], protected[b, k], counts[b])
      assert ours == expected


def test_an_infinite_score_is_kept_after_protected_slots():
  scores = jnp.asarray([[[jnp.inf, 2.0, 9.0, -jnp.inf, 1.0]]])
  valid = jnp.ones(scores.shape, bool)
  last = jnp.asarray([[[False, False, False, False, True]]])
  for count, kept in ((1, [4]), (2, [0, 4]), (3, [0, 2, 4])):
    slots = top_slots(scores, valid, last, jnp.asarray([count]), count)
    assert slots.tolist() == [[kept]]


def test_unfilled_slots_come_last():
  scores = jnp.asarray([[[3.0, 1.0, 2.0, 0.0]]])
  valid = jnp.asarray([[[True, False, True, False]]])
  none = jnp.zeros_like(valid)
  slots = top_slots(scores, valid, none, jnp.asarray([3]), 3)
  assert slots.tolist() == [[[0, 2, -1]]]


def test_age_counts_from_the_newest():
  valid = jnp.asarray([True, False, True, True, False])
  assert age(valid).tolist() == [3, 2, 2, 1, 0]


@pytest.mark.parametrize(
  ("share", "length", "kept"),
  [
    (0.1, 70, 7),
    (0.1, 71, 8),
    (0.25, 10, 3),
    (1.0, 9, 9),
    (1e-6, 5, 1),
    (1e-10, 5, 1),
  ],
)
def test_retention_rounds_up(share, length, kept):
  assert Retention(share).num_kept(length) == kept


def test_retention_is_exact_at_a_million_tokens():
  assert Retention(0.1).num_kept(1_000_000) == 100_000


def test_tokens_keep_at_most_the_row():
  assert [Tokens(5).num_kept(n) for n in (3, 5, 9)] == [3, 5, 5]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, 1.7, float("nan")])
def test_retention_outside_its_range_is_refused(share):
  with pytest.raises(InputError, match="above 0 and at most 1"):
    Retention(share)


@pytest.mark.parametrize("count", [0, -3])
def test_an_empty_budget_is_refused(count):
  with pytest.raises(InputError, match="give 1 or more"):
    Tokens(count)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.333, 0.5, 0.999, 1.0])
def test_shares_are_exact(share):
  counts = np.arange(0, 3000, 7, dtype=np.int32)
  exact = [Fraction(str(share)) * int(n) for n in counts]
  np.testing.assert_array_equal(
    floor_share(jnp.asarray(counts), share), [math.floor(x) for x in exact]
  )
  assert [Retention(share).nearest(int(n)) for n in counts] == [
    math.floor(x + Fraction(1, 2)) for x in exact
  ]
