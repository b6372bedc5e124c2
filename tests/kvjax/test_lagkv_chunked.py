"""LagKV in its chunked prefill and while decoding."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.engine.compression_plan import Plan
from kvjax.methods import LagKV
from kvjax.testing import TinyModel, kept_positions

# Half the time to compile, where one layer shows it all.
MODEL = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 4096))
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17)]
PROMPTS = kvjax.Prompts.of(ROWS)
ASKED = [[5, 3], [8], [9, 7, 9]]
QUESTIONS = kvjax.Prompts.of(ASKED, 8)


@pytest.mark.slow
def test_lagkv_keeps_its_frozen_part_bit_for_bit():
  schedule = kvjax.Schedule(every=1)
  plan = Plan(LagKV(sinks=2, lag=5), kvjax.Retention(0.4), schedule=schedule)
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  before = jax.tree.map(np.asarray, cache.layers)
  cache = kvjax.reserve(cache, 60)
  after = kvjax.generate(
    MODEL, PARAMS, cache, QUESTIONS, kvjax.Decoding(40), keep=True
  ).cache
  for old, new in zip(before, after.layers, strict=True):
    for row, n in enumerate((61, 40, 17)):
      frozen = 2 + 2 * ((n - 2) // 5 - 1)
      for name in ("keys", "values", "positions"):
        np.testing.assert_array_equal(
          getattr(new, name)[row, :, :frozen],
          getattr(old, name)[row, :, :frozen],
        )


@pytest.mark.parametrize(
  ("size", "first"),
  [
    (5, 12),
    (1, None),
    pytest.param(1, 12, marks=pytest.mark.slow),
    pytest.param(5, None, marks=pytest.mark.slow),
    pytest.param(12, None, marks=pytest.mark.slow),
    pytest.param(12, 12, marks=pytest.mark.slow),
  ],
)
def test_lagkv_in_chunks_ends_at_the_length_of_the_plain_prefill(size, first):
  method, budget = LagKV(sinks=2, lag=5), kvjax.Retention(0.4)
  plain, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, Plan(method, budget))
  schedule = kvjax.Schedule(block=size, first=first)
  chunked, _ = kvjax.prefill(
    MODEL, PARAMS, PROMPTS, Plan(method, budget, schedule=schedule)
  )
  np.testing.assert_array_equal(chunked.lengths, plain.lengths)


def test_lagkv_in_chunks_keeps_what_the_plain_prefill_keeps_of_layer_0():
  """The first layer sees the same keys, and what is scored is never late."""
  method, budget = LagKV(sinks=2, lag=5), kvjax.Retention(0.4)
  plain, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, Plan(method, budget))
  schedule = kvjax.Schedule(block=5, first=12)
  chunked, _ = kvjax.prefill(
    MODEL, PARAMS, PROMPTS, Plan(method, budget, schedule=schedule)
  )
  for row in range(3):
    assert kept_positions(chunked, row)[0] == kept_positions(plain, row)[0]


LATER = kvjax.get_plan(
  "lagkv:sinks=2:lag=4", kvjax.Retention(0.25), schedule=kvjax.Schedule(every=4)
)


@pytest.mark.parametrize(
  ("name", "share"), [("lagkv:sinks=2:lag=4", 0.5), ("keydiff", 0.25)]
)
def test_lagkv_does_not_go_on_from_what_others_kept(name, share):
  """What it never evicts would leave no place for the newest tokens."""
  with pytest.raises(kvjax.InputError, match="counts on what it kept itself"):
    kvjax.get_plan(name, kvjax.Retention(share), decoding=LATER)


@pytest.mark.parametrize(
  ("name", "share"), [("lagkv:sinks=2:lag=4", 0.25), ("full", 1.0)]
)
def test_lagkv_keeps_the_newest_while_decoding(name, share):
  plan = kvjax.get_plan(name, kvjax.Retention(share), decoding=LATER)
  kept = []
  for rows in (ROWS[1:2], [ROWS[1], ROWS[0]]):
    prompts = kvjax.Prompts.of(rows)
    cache, logits = kvjax.prefill(MODEL, PARAMS, prompts, plan)
    cache = kvjax.generate(
      MODEL,
      PARAMS,
      kvjax.reserve(cache, 24),
      logits,
      kvjax.Decoding(18),
      keep=True,
    ).cache
    kept.append(kept_positions(cache, 0)[0][0])
  alone, beside = kept
  assert alone == beside
  tokens = len(ROWS[1]) + 18
  assert alone[-4:] == [*range(tokens - 4, tokens)]
