"""What caches recite, against tokens that are judged one at a time."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.methods import KeyDiff
from kvjax.testing import TinyModel, poison_cache

MODEL = TinyModel()
PARAMS = MODEL.init()
REQUEST = kvjax.RepeatRequest((3, 1, 4), (11, 12), (13, 14, 15), (9, 2))
ASKED = [*REQUEST.first, *REQUEST.suffix]
RNG = np.random.default_rng(0)
# The second and the third begin as the template, or half of it; the last one
# is nothing else.
ROWS = [RNG.integers(5, 64, n).tolist() for n in (21, 9, 6, 3)]
ROWS[1][:3] = REQUEST.prefix
ROWS[2][:2] = REQUEST.prefix[:2]
ROWS[3] = list(REQUEST.prefix)
TEMPLATE = [0, 3, 2, 2]
PLANS = {
  "full": kvjax.get_plan("full", 1.0),
  "keydiff": kvjax.get_plan("keydiff", kvjax.Tokens(4)),
  "ada/keydiff": kvjax.get_plan("ada/keydiff", kvjax.Retention(0.4)),
  "int8": kvjax.get_plan("snapkv:window=2", kvjax.Tokens(4), kv_dtype="int8"),
}


def prompts_of(rows=ROWS, padded=32, request=REQUEST, **kwargs):
  return kvjax.Prompts.of(rows, padded, repeat_request=request, **kwargs)


PROMPTS = prompts_of()


@pytest.fixture(scope="module")
def caches():
  swept, _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, PLANS.values())
  return dict(zip(PLANS, swept, strict=True))


def recited(caches, prompts=PROMPTS, weights=None, full=None):
  full = caches["full"] if full is None else full
  return kvjax.recited(
    MODEL, PARAMS, prompts, full, list(caches.values()), weights
  )


def one_by_one(cache):
  """-ln p of the recited tokens of each row, each in a pass of its own."""
  longest = max(map(len, ROWS))
  found = np.full((len(ROWS), longest), np.nan)
  for index in range(longest):
    places = [
      min(start + index, len(row) - 1)
      for row, start in zip(ROWS, TEMPLATE, strict=True)
    ]
    before = [
      ASKED + row[start:place]
      for row, start, place in zip(ROWS, TEMPLATE, places, strict=True)
    ]
    answers = [[row[place]] for row, place in zip(ROWS, places, strict=True)]
    nll = kvjax.answer_nll(
      MODEL,
      PARAMS,
      cache,
      kvjax.Prompts.of(before, 32),
      kvjax.Prompts.of(answers),
    )
    real = [s + index < len(r) for r, s in zip(ROWS, TEMPLATE, strict=True)]
    found[real, index] = np.asarray(nll, np.float64)[real]
  return found


@pytest.fixture(scope="module")
def shares(caches):
  """For each cache, the shares of the recited tokens of each row."""
  nll = {name: one_by_one(cache) for name, cache in caches.items()}
  return {
    name: np.exp(-np.maximum(own - nll["full"], 0)) for name, own in nll.items()
  }


def test_shares_are_those_of_single_tokens(caches, shares):
  found = recited(caches)
  assert found.shape == (4, 4)
  expected = [np.nanmean(own, axis=1) for own in shares.values()]
  np.testing.assert_allclose(found, expected, rtol=2e-5)
  # The full cache loses nothing; the others do, where they evict.
  assert np.all(found[0] == 1)
  assert np.all(found[1:3, :3] < 0.99)


def test_only_tokens_with_weights_count(caches, shares):
  """In the row that has none of them, all do."""
  # No row has 0, but padding is made of it.
  weights = {0: 1.0, ROWS[0][4]: 0.5, ROWS[0][9]: 1.0, ROWS[1][5]: 0.25}
  found = recited(caches, weights=weights)
  for cache, own in enumerate(shares.values()):
    for row, tokens in enumerate(ROWS):
      ids = tokens[TEMPLATE[row] :]
      given = np.array([weights.get(token, 0.0) for token in ids])
      assert bool(given.any()) == (row < 2)
      given = given if given.any() else np.ones(len(ids))
      expected = np.average(own[row, : len(ids)], weights=given)
      np.testing.assert_allclose(found[cache, row], expected, rtol=2e-5)
  assert np.any(np.abs(found - recited(caches))[1, :2] > 1e-3)


def test_padding_and_empty_slots_have_no_say(caches):
  expected = recited(caches)
  poisoned = {
    name: poison_cache(cache)
    for name, cache in caches.items()
    if name != "int8"
  }
  found = recited(poisoned)
  np.testing.assert_allclose(found, expected[:3], rtol=2e-5)
  wider = prompts_of(padded=80)
  np.testing.assert_allclose(recited(caches, wider), expected, rtol=2e-5)


def test_what_is_not_a_number_stays_none():
  assert any(40 in row for row in ROWS)
  broken = PARAMS["embedding"].at[40].set(np.nan)
  params = PARAMS | {"embedding": broken}
  (full,), _ = kvjax.sweep(MODEL, params, PROMPTS, [PLANS["full"]])
  found = kvjax.recited(MODEL, params, PROMPTS, full, [full])
  assert np.isnan(found).any()


def test_no_cache_recites_nothing(caches):
  found = kvjax.recited(MODEL, PARAMS, PROMPTS, caches["full"], [])
  assert found.shape == (0, len(ROWS))


def test_mistakes_are_explained(caches):
  one = {"full": caches["full"]}
  for request in (None, kvjax.RepeatRequest(later=(1, 2))):
    with pytest.raises(InputError, match="these prompts do not say how"):
      recited(one, prompts_of(request=request))
  with pytest.raises(InputError, match="There are 3 prompts, and a cache has"):
    recited(one, prompts_of(ROWS[:3]))
  with pytest.raises(InputError, match="is that of other prompts"):
    recited(one, prompts_of([row[:-1] for row in ROWS]))
  for weights in ({5: -1.0}, {5: np.nan}):
    with pytest.raises(InputError, match="are finite numbers from 0 on by"):
      recited(one, weights=weights)
  foreign = dataclasses.replace(REQUEST, first=(99,))
  with pytest.raises(InputError, match="99"):
    recited(one, prompts_of(request=foreign))
  long = prompts_of([[7] * 2047], 2048)
  with pytest.raises(InputError, match=r"recited, has 4098 tokens; .* 4096"):
    recited(one, long)
  schedule = kvjax.Schedule(every=2)
  plan = kvjax.Plan(KeyDiff(), kvjax.Tokens(10), schedule=schedule)
  evicting, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  with pytest.raises(InputError, match="goes on evicting every 2"):
    kvjax.recited(MODEL, PARAMS, PROMPTS, caches["full"], [evicting])


def test_pairs_are_no_mapping(caches, untyped):
  pairs = ((5, 0.5),)
  with pytest.raises(InputError, match="are finite numbers from 0 on by"):
    recited({"full": caches["full"]}, weights=pairs)
