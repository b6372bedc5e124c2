"""Eviction that goes on while decoding."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placed_model import Placed

import kvjax
from kvjax.allocation import Sizes, Uniform
from kvjax.engine import decode
from kvjax.engine.capacity import prepare_decoding
from kvjax.engine.evicting import evict_all
from kvjax.engine.preparing import prepare
from kvjax.errors import InputError
from kvjax.model import Geometry
from kvjax.registry.registry import METHODS, recipe_of
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel()
PARAMS = MODEL.init()

# Half the time to compile, where one layer shows it all.
ONE_LAYER = Placed(Geometry.uniform(1, 4, 2, 8, 4096))
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17)]
PROMPTS = kvjax.Prompts.of(ROWS)
ASKED = [[5, 3], [8], [9, 7, 9]]
QUESTIONS = kvjax.Prompts.of(ASKED, 8)
ALL = kvjax.Retention(1.0)

BUDGET = kvjax.Tokens(12)
# What each remembers, or does not, is of another kind.
NAMES = [
  "h2o",
  "snapkv:window=6:kernel=3:pooling=max",
  "keydiff:recent_frac=0.2",
  "lagkv:sinks=2:lag=5",
]


def budget_of(name):
  return kvjax.Retention(0.4) if name.startswith("lagkv") else BUDGET


def prefill(name, schedule, rows=ROWS, model=MODEL, params=PARAMS):
  return kvjax.prefill(
    model,
    params,
    kvjax.Prompts.of(rows, 64),
    kvjax.get_plan(name, budget_of(name), schedule=schedule),
  )


def converse(cache, prompts, decoding, model=MODEL, params=PARAMS):
  """A turn of a conversation: the answers, and the cache then."""
  answers = kvjax.generate(model, params, cache, prompts, decoding, keep=True)
  return answers, answers.cache


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [*NAMES, "random", "streaming", "tova", "keydiff"]
)
def test_rows_stand_alone_and_decoding_stays_within_the_budget(name):
  schedule = kvjax.Schedule(block=8, every=2)
  budget = budget_of(name)
  spread = kvjax.get_plan(name, budget, schedule=schedule).spread
  decoding = kvjax.Decoding(30)
  model, params = ONE_LAYER, ONE_LAYER.init()

  def run(rows, questions):
    cache, logits = prefill(name, schedule, rows, model, params)
    prompt = [kept_positions(cache, row) for row in range(3)]
    lengths = [cache.lengths]
    cache = kvjax.reserve(cache, 40)
    answers, cache = converse(cache, questions, decoding, model, params)
    return prompt, logits, answers.tokens, cache, [*lengths, cache.lengths]

  prompt, logits, tokens, cache, lengths = run(ROWS, QUESTIONS)
  seen = np.asarray(cache.next_positions)
  np.testing.assert_array_equal(seen, [61 + 32, 40 + 31, 17 + 33])
  for valid, length in zip(lengths, ([61, 40, 17], seen), strict=True):
    counts = spread.counts(budget, np.asarray(length), Sizes((2,)))[:, :, None]
    np.testing.assert_array_equal(valid, np.broadcast_to(counts, valid.shape))
  # Other mates and another place, in the same programs.
  others = [[7, 7, 8], ROWS[1][::-1], ROWS[0]]
  asked = kvjax.Prompts.of([[2], [4, 4], ASKED[0]], 8)
  first, own, said, mixed, _ = run(others, asked)
  assert first[2] == prompt[0]
  np.testing.assert_allclose(own[2], logits[0], rtol=0, atol=1e-5)
  np.testing.assert_array_equal(said[2], tokens[0])
  assert kept_positions(mixed, 2) == kept_positions(cache, 0)


def evicts(entry):
  """Whether it goes on to a budget in tokens."""
  recipe = recipe_of(entry.make())
  traits, law = recipe.method.traits, recipe.method.allocation
  stays = traits.whole_prompts_only or traits.keeps_all
  return recipe.allocation is None and law == Uniform() and not stays


# A target while decoding is no less than the window.
SMALL = {"snapkv": "snapkv:window=5"}
EVICTING = [
  SMALL.get(name, name) for name, entry in METHODS.items() if evicts(entry)
]
SCHEDULES = [(3, 8), (1, None), (1, 8), (3, None)]
# One row is over the limit from the start, one grows over it, one never does.
LIMIT = 20
UNEQUAL = [ROWS[0][:29], ROWS[1][:15], ROWS[2][:9]]
STEPS = 8


def held_by_the_rule(every, block):
  """What rows hold after the prompt, and after each token and eviction."""
  valid = [0, 0, 0]
  for start in range(0, 32, block or 32):
    new = [min(max(len(row) - start, 0), block or 32) for row in UNEQUAL]
    valid = [min(a + b, LIMIT) for a, b in zip(valid, new, strict=True)]
  history = [valid]
  asked = [len(row) for row in ASKED]
  valid = [min(a + b, LIMIT) for a, b in zip(valid, asked, strict=True)]
  for step in range(1, STEPS + 1):
    valid = [count + 1 for count in valid]
    history.append(valid)
    if step % every == 0 or step == STEPS:
      valid = [min(count, LIMIT) for count in valid]
      history.append(valid)
  return history


@pytest.mark.parametrize(
  ("name", "every", "block"),
  [(name, *schedule) for name in EVICTING for schedule in SCHEDULES],
)
def test_every_step_holds_what_the_budget_says(name, every, block, monkeypatch):
  """A budget in tokens is no less for a row that is shorter so far."""
  told = []

  def tell(valid):
    told.append(np.array(valid))

  def watched(change):
    def run(*args, **options):
      result = change(*args, **options)
      cache = result if change is evict_all else result[1]
      jax.debug.callback(tell, cache.lengths, ordered=True)
      return result

    return run

  feed, evict_all = decode.feed, decode.evict_all
  monkeypatch.setattr(decode, "feed", watched(feed))
  monkeypatch.setattr(decode, "evict_all", watched(evict_all))
  # Of its own, so that no other test runs the programs that tell.
  model = dataclasses.replace(ONE_LAYER, vocab_size=65)
  params = model.init()
  plan = kvjax.get_plan(
    name, kvjax.Tokens(LIMIT), schedule=kvjax.Schedule(block=block, every=every)
  )
  prompts = kvjax.Prompts.of(UNEQUAL, 32)
  cache, _ = kvjax.prefill(model, params, prompts, plan)
  told.append(np.array(cache.lengths))
  cache = kvjax.reserve(cache, 8 + STEPS)
  decoding = kvjax.Decoding(STEPS)
  _, cache = converse(cache, QUESTIONS, decoding, model, params)
  jax.effects_barrier()
  history = held_by_the_rule(every, block)
  assert history[-1] == [LIMIT, LIMIT, 9 + 3 + STEPS]
  assert [valid[0, :, 0].tolist() for valid in told] == history
  assert all(np.ptp(valid, axis=2).max() == 0 for valid in told)
  np.testing.assert_array_equal(cache.lengths, told[-1])


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("snapkv:window=16:sinks=4", "the first 4 and the last 16 tokens"),
    ("rkv:window=20", "the last 20 tokens"),
    ("streaming:sinks=20", "the first 20 tokens"),
    ("lagkv.kvpress:sinks=20", "the first 20 tokens"),
    ("h2o:recent=20", "the last 20 tokens"),
  ],
)
def test_a_target_below_what_always_stays_is_refused(name, sentence):
  schedule = kvjax.Schedule(every=8)
  kvjax.get_plan(name, kvjax.Tokens(20), schedule=schedule)
  # It does no harm to a prompt, whose newest tokens stay.
  kvjax.get_plan(name, kvjax.Tokens(19))
  with pytest.raises(
    InputError, match=f"{sentence}; .* 20 .*, not 19"
  ) as error:
    kvjax.get_plan(name, kvjax.Tokens(19), schedule=schedule)
  assert str(error.value).count(". ") == 0


def test_a_share_below_what_always_stays_is_refused_when_it_is_known():
  """Of 61, 40 and 17 tokens: 0.4 of the last is less than the window."""
  schedule = kvjax.Schedule(every=8)
  sentence = "the last 9 tokens; evict to 9 .* not 7"
  share = kvjax.Retention(0.4)
  plan = kvjax.get_plan("rkv:window=9", share, schedule=schedule)
  with pytest.raises(InputError, match=sentence):
    kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  later = kvjax.get_plan("full", ALL, decoding=plan)
  with pytest.raises(InputError, match=sentence):
    kvjax.prefill(MODEL, PARAMS, PROMPTS, later)
  for allowed in (
    kvjax.get_plan("rkv:window=7", share, schedule=schedule),
    kvjax.get_plan("rkv:window=40", ALL, schedule=schedule),
    kvjax.get_plan("rkv:window=9", share),
  ):
    prepare(allowed, PROMPTS, MODEL.geometry)


@pytest.mark.slow
def test_a_conversation_that_evicts_says_how_much_room_it_needs():
  schedule = kvjax.Schedule(block=8, every=4)
  cache, _ = prefill("keydiff", schedule)
  with pytest.raises(InputError, match="need 8 free slots and the cache has 0"):
    converse(cache, QUESTIONS, kvjax.Decoding(9))
  cache = kvjax.reserve(cache, 8 + 3)  # tokens since the last eviction
  _, cache = converse(cache, QUESTIONS, kvjax.Decoding(9))
  _, cache = converse(cache, QUESTIONS, kvjax.Decoding(9))
  assert cache.layers[0].capacity == 12 + 11


def test_room_for_a_turn_is_enough_whatever_the_budget():
  """Also where the cache never holds as many tokens as it may."""
  schedule = kvjax.Schedule(every=4)
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(500), schedule=schedule)
  prompts = kvjax.Prompts.of([ROWS[0][:9], ROWS[0][:4]], 9)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  question = kvjax.Prompts.of([[5], [6]], 3)
  turns = [
    converse(kvjax.reserve(cache, room), question, kvjax.Decoding(9))
    for room in (600, 3 + 9)
  ]
  (answers, roomy), (same_answers, tight) = turns
  assert answers.rows() == same_answers.rows()
  for row in range(2):
    assert kept_positions(tight, row) == kept_positions(roomy, row)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "every"), [("h2o", 2), ("snapkv:window=4", 1)]
)
def test_a_conversation_that_evicts_uses_the_buffers_of_its_cache(name, every):
  """What the method remembers too, and each layer once evicted."""
  cache, _ = prefill(name, kvjax.Schedule(every=every))
  cache = kvjax.reserve(cache, 8 + 20)
  given = [leaf for leaf in jax.tree.leaves(cache.stacks) if leaf.ndim > 1]
  places = {leaf.unsafe_buffer_pointer() for leaf in given}
  decoding = kvjax.Decoding(20)
  _, cache = converse(cache, QUESTIONS, decoding)
  assert all(leaf.is_deleted() for leaf in given)
  got = [leaf for leaf in jax.tree.leaves(cache.stacks) if leaf.ndim > 1]
  assert {leaf.unsafe_buffer_pointer() for leaf in got} == places
  assert len(places) == len(got) == len(given)


@pytest.mark.parametrize("name", ["full", "key_norm:skip_layers=0"])
def test_a_layer_that_keeps_everything_has_room_for_it(name):
  """A short question in a wide block leaves a gap that takes room as well."""
  plan = kvjax.get_plan(name, BUDGET, schedule=kvjax.Schedule(every=1))
  prompts = kvjax.Prompts.of([ROWS[0][:33]], 48)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  question = kvjax.Prompts.of([[5]], 32)
  decoding = kvjax.Decoding(31)
  cache = kvjax.reserve(cache, 63)
  _, cache = converse(cache, question, decoding)
  assert kept_positions(cache, 0)[0] == [list(range(33 + 1 + 31))] * 2


def test_all_of_everything_stays_all_while_decoding():
  plan = kvjax.get_plan("keydiff", ALL, schedule=kvjax.Schedule(every=1))
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  once = kvjax.get_plan("keydiff", ALL)
  once, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, once)
  assert (cache.plan, once.plan) == (plan, None)
  decoding = kvjax.Decoding(8)
  went_on = kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, decoding)
  dense = kvjax.generate(MODEL, PARAMS, once, QUESTIONS, decoding)
  np.testing.assert_array_equal(went_on.tokens, dense.tokens)


def test_the_last_token_of_an_answer_is_followed_by_an_eviction():
  plan = kvjax.get_plan("keydiff", BUDGET, schedule=kvjax.Schedule(every=4))
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  room = kvjax.reserve(cache, 32)
  _, after = converse(room, QUESTIONS, kvjax.Decoding(6))
  assert after.lengths.max() == BUDGET.count


@pytest.mark.slow
def test_a_row_that_ends_early_is_left_as_it_would_be_alone():
  schedule = kvjax.Schedule(every=4)
  plan = kvjax.get_plan("keydiff", BUDGET, schedule=schedule)

  def run(rows, questions, stop):
    cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(rows, 64), plan)
    decoding = kvjax.Decoding(12, stop)
    cache = kvjax.reserve(cache, 16)
    return converse(cache, kvjax.Prompts.of(questions, 8), decoding)

  free, _ = run(ROWS, ASKED, ())
  stop = (free.rows()[0][1],)
  answers, together = run(ROWS, ASKED, stop)
  lengths = np.asarray(answers.lengths)
  assert lengths[0] <= 1 < lengths.max()
  for row, (ids, question) in enumerate(zip(ROWS, ASKED, strict=True)):
    _, alone = run([ids], [question], stop)
    assert kept_positions(alone, 0) == kept_positions(together, row)


def test_the_observation_window_is_the_last_queries_of_each_row():
  schedule = kvjax.Schedule(block=7, every=1)
  cache, _ = prefill("snapkv:window=6", schedule)
  window = cache.layers[0].window
  np.testing.assert_array_equal(
    window.positions, [np.arange(n - 6, n) for n in (61, 40, 17)]
  )
  short, _ = prefill("snapkv:window=6", schedule, [[1, 2, 3], *ROWS[1:]])
  np.testing.assert_array_equal(
    short.layers[0].window.positions[0], [-1, -1, -1, 0, 1, 2]
  )


def test_bytes_count_what_is_remembered():
  schedule = kvjax.Schedule(every=1)
  plain, _ = prefill("h2o", kvjax.Schedule())
  knowing, _ = prefill("h2o", schedule)
  slots = 3 * 2 * 12
  assert knowing.nbytes - plain.nbytes == 2 * 4 * slots
  assert jnp.asarray(knowing.layers[0].remembered).shape == (3, 2, 12)


def test_what_cannot_be_joined_is_refused():
  one, _ = prefill("h2o", kvjax.Schedule())
  other, _ = prefill("h2o", kvjax.Schedule(every=1))
  with pytest.raises(InputError, match="There is no cache to join"):
    kvjax.stack([])
  with pytest.raises(InputError, match="Only caches of equally many rows"):
    kvjax.stack([one, other])


@pytest.mark.slow
def test_h2o_accumulates_across_blocks_and_steps():
  """With room for everything the sums are those of one dense pass."""

  def prefill(schedule):
    plan = kvjax.get_plan("h2o", ALL, schedule=schedule)
    return kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)[0]

  in_blocks = prefill(kvjax.Schedule(block=8, every=1))
  at_once = prefill(kvjax.Schedule(every=1))
  for one, other in zip(in_blocks.layers, at_once.layers, strict=True):
    np.testing.assert_allclose(one.remembered, other.remembered, atol=1e-5)
  sums = np.asarray(in_blocks.layers[0].remembered).sum(axis=-1)
  np.testing.assert_allclose(sums, [[61, 61], [40, 40], [17, 17]], rtol=1e-5)


@pytest.mark.slow
def test_what_is_remembered_is_dropped_where_nothing_asks_for_it():
  for name in ("h2o", "snapkv:window=4"):
    for schedule in (kvjax.Schedule(), kvjax.Schedule(block=8)):
      cache, _ = prefill(name, schedule)
      assert cache.layers[0].remembered is None
      assert cache.layers[0].window is None


def test_no_layer_is_written_unless_a_row_is_due():
  """What the compiled program writes is in the branch of an eviction."""
  plan = kvjax.get_plan("keydiff", BUDGET, schedule=kvjax.Schedule(every=1))
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  room = kvjax.reserve(cache, tokens=8)
  lengths = np.array([len(row) for row in ROWS])
  prepared = prepare_decoding(MODEL, room, lengths, 0, kvjax.Decoding(8))
  evict = jax.jit(lambda cache: evict_all(MODEL, prepared, cache))
  compiled = evict.lower(room).compile().as_text()
  names = re.findall(r'dynamic-update-slice.*op_name="([^"]*)"', compiled)
  writes = [name for name in names if "while/body" in name]
  assert writes
  assert all("cond/branch" in name for name in writes)
