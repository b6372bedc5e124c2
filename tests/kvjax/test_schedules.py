"""Eviction block by block and while decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import blocks
from kvjax.cache import LayerCache
from kvjax.errors import InputError
from kvjax.methods import METHODS, LagKV, get_method
from kvjax.plans import Plan
from kvjax.sharding import parse_mesh
from kvjax.step import Limits
from kvjax.testing import TinyModel, held_positions

MODEL = TinyModel()
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17)]
PROMPTS = kvjax.Prompts.of(ROWS)
ASKED = [[5, 3], [8], [9, 7, 9]]
QUESTIONS = kvjax.Prompts.of(ASKED, 8)
ALL = kvjax.Retention(1.0)

# Everything that is defined for blocks and decoding, at budgets that bite.
BUDGET = kvjax.Tokens(12)
NAMES = [
  "random",
  "streaming",
  "key_norm",
  "h2o",
  "h2o.keydiff",
  "tova",
  "tova.keydiff",
  "snapkv:window=4",
  "snapkv:window=6:kernel=3:pooling=max",
  "keydiff",
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
    get_method(name),
    budget_of(name),
    schedule,
  )


class Slow:
  """A layer's cache as lists per row and head: the methods by hand, float64.

  Nothing is shared with the package but the activations that it is fed.
  """

  def __init__(self, name, counts):
    self.name, self.counts = name, counts
    self.held = None  # [row][head] -> list of entries
    self.queries = None  # [row] -> all queries so far, [n, N, D]

  def step(self, seen):
    """Appends a block; evicts; answers nothing."""
    q, k = (np.asarray(x, np.float64) for x in (seen.queries, seen.keys))
    places = np.asarray(seen.positions)
    rows, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    if self.held is None:
      self.held = [[[] for _ in range(kv_heads)] for _ in range(rows)]
      self.queries = [[] for _ in range(rows)]
    for row in range(rows):
      new = [s for s in range(places.shape[1]) if places[row, s] >= 0]
      self.queries[row] += [q[row, :, s] for s in new]
      for head in range(kv_heads):
        entries = self.held[row][head]
        for s in new:
          entries.append(
            dict(p=int(places[row, s]), k=k[row, head, s], mass=0.0)
          )
        mine = slice(head * group, (head + 1) * group)
        for s in new:
          visible = [e for e in entries if e["p"] <= places[row, s]]
          weights = self._weights(q[row, mine, s], visible).mean(axis=0)
          for entry, weight in zip(visible, weights, strict=True):
            entry["mass"] += weight
      for head in range(kv_heads):
        self._evict(row, head, group)

  def _weights(self, queries, entries):
    keys = np.array([e["k"] for e in entries])
    logits = queries @ keys.T / np.sqrt(keys.shape[1])
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)

  def _evict(self, row, head, group):
    entries, count = self.held[row][head], self.counts[row]
    if len(entries) <= count:
      return
    scores = np.array(self._scores(row, head, group, entries))
    order = sorted(range(len(entries)), key=lambda i: (-scores[i], i))
    kept = sorted(order[:count])
    self.held[row][head] = [entries[i] for i in kept]

  def _scores(self, row, head, group, entries):
    keys = np.array([e["k"] for e in entries])
    mine = slice(head * group, (head + 1) * group)
    if self.name == "keydiff":
      unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
      anchor = unit.mean(axis=0)
      return -unit @ anchor / np.linalg.norm(anchor)
    if self.name == "key_norm":
      return -np.linalg.norm(keys, axis=1)
    if self.name == "streaming":
      return [1e9 if e["p"] < 4 else e["p"] for e in entries]
    if self.name == "tova.keydiff":
      return self._weights(self.queries[row][-1][mine], entries).mean(axis=0)
    if self.name in ("h2o", "h2o.keydiff"):
      recent = self.counts[row] // 2 if self.name == "h2o" else 0
      newest = len(entries) - recent
      return [1e9 if i >= newest else e["mass"] for i, e in enumerate(entries)]
    assert self.name == "snapkv:window=4:kernel=1"
    window = self.queries[row][-4:]
    start = len(self.queries[row]) - len(window)
    votes = np.zeros(len(entries))
    for number, query in enumerate(window):
      sees = [i for i, e in enumerate(entries) if e["p"] <= start + number]
      weights = self._weights(query[mine], [entries[i] for i in sees])
      votes[sees] += weights.mean(axis=0)
    votes[-4:] = 1e9
    return votes

  def positions(self, row):
    return [[e["p"] for e in entries] for entries in self.held[row]]


@pytest.mark.parametrize("block", [7])
@pytest.mark.parametrize(
  "name",
  [
    "keydiff",
    "key_norm",
    "streaming",
    "h2o",
    "h2o.keydiff",
    "tova.keydiff",
    "snapkv:window=4:kernel=1",
  ],
)
def test_blocks_evict_what_the_loops_evict(name, block):
  """The layers' inputs are replayed: attention itself is tested elsewhere."""
  geometry = dataclasses.replace(MODEL.geometry, layers=1)
  model = dataclasses.replace(MODEL, geometry=geometry)
  params = model.init(1)
  cache, _ = prefill(
    name, kvjax.Schedule(block=block), model=model, params=params
  )
  slow = Slow(name, [12] * 3)

  def replay(_, state, seen):
    slow.step(seen)
    return seen.queries, state

  width = -(-61 // block) * block
  tokens = np.zeros((3, width), np.int32)
  for row, ids in enumerate(ROWS):
    tokens[row, : len(ids)] = ids
  for start in range(0, width, block):
    places = np.arange(start, start + block, dtype=np.int32)
    lengths = np.array([len(ids) for ids in ROWS])
    positions = np.where(places[None] < lengths[:, None], places[None], -1)
    own = jnp.asarray(tokens[:, start : start + block])
    model.hidden(params, own, jnp.asarray(positions), (None,), replay)
  for row in range(3):
    assert held_positions(cache, row)[0] == slow.positions(row)


@pytest.mark.parametrize("name", NAMES)
def test_rows_stand_alone_and_decoding_stays_within_the_budget(name):
  schedule = kvjax.Schedule(block=8, every=2)
  plan = Plan(get_method(name), budget_of(name), schedule)
  decoding = kvjax.Decoding(30)

  def run(rows, questions):
    cache, logits = prefill(name, schedule, rows)
    prompt = held_positions(cache, 0)
    lengths = [cache.lengths]
    cache = kvjax.reserve(cache, 40)
    answers, cache = kvjax.converse(
      MODEL, PARAMS, cache, questions, decoding, plan=plan
    )
    return prompt, logits, answers.tokens, cache, [*lengths, cache.lengths]

  prompt, logits, tokens, cache, lengths = run(ROWS, QUESTIONS)
  seen = np.asarray(cache.next_positions)
  np.testing.assert_array_equal(seen, [61 + 32, 40 + 31, 17 + 33])
  for held, length in zip(lengths, ([61, 40, 17], seen), strict=True):
    counts = plan.counts(np.asarray(length), 2)[:, :, None]
    np.testing.assert_array_equal(held, np.broadcast_to(counts, held.shape))
  for row, (ids, question) in enumerate(zip(ROWS, ASKED, strict=True)):
    asked = kvjax.Prompts.of([question], QUESTIONS.tokens.shape[1])
    first, own, said, alone, _ = run([ids], asked)
    np.testing.assert_allclose(own[0], logits[row], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(said[0], tokens[row])
    assert held_positions(alone, 0) == held_positions(cache, row)
    if row == 0:
      assert first == prompt


FEW = [
  "h2o",
  "tova",
  "snapkv:window=4",
  "keydiff",
  "lagkv:sinks=2:lag=5",
]


@pytest.mark.parametrize("name", FEW)
def test_one_block_is_the_whole_prompt(name):
  whole, logits = prefill(name, kvjax.Schedule())
  block, own = prefill(name, kvjax.Schedule(block=64))
  for row in range(3):
    assert held_positions(block, row) == held_positions(whole, row)
  np.testing.assert_allclose(own, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_a_budget_that_holds_everything_changes_nothing(name):
  method = get_method(name)
  schedule = kvjax.Schedule(block=8, every=1)
  budget = ALL if isinstance(method, LagKV) else kvjax.Tokens(200)
  plan = Plan(method, budget, schedule)
  dense, logits = kvjax.prefill(MODEL, PARAMS, PROMPTS, METHODS["full"](), ALL)
  cache, own = kvjax.prefill(MODEL, PARAMS, PROMPTS, method, budget, schedule)
  for row in range(3):
    assert held_positions(cache, row) == held_positions(dense, row)
  np.testing.assert_allclose(own, logits, rtol=0, atol=1e-5)
  decoding = kvjax.Decoding(20)
  expected = kvjax.answer(MODEL, PARAMS, dense, QUESTIONS, decoding)
  got = kvjax.answer(MODEL, PARAMS, cache, QUESTIONS, decoding, plan=plan)
  np.testing.assert_array_equal(got.tokens, expected.tokens)


@pytest.mark.parametrize("name", FEW[:4])
def test_four_devices_equal_one(name):
  schedule = kvjax.Schedule(block=8, every=2)
  rows = [*ROWS, ROWS[1][:30]]
  one, logits = prefill(name, schedule, rows)
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    four, own = prefill(name, schedule, rows)
  for row in range(4):
    assert held_positions(one, row) == held_positions(four, row)
  np.testing.assert_allclose(own, logits, rtol=0, atol=1e-5)


def test_h2o_accumulates_across_blocks_and_steps():
  """With room for everything the sums are those of one dense pass."""
  schedule = kvjax.Schedule(block=8, every=1)
  method = get_method("h2o")
  args = (MODEL, PARAMS, PROMPTS, method, ALL)
  in_blocks, _ = kvjax.prefill(*args, schedule)
  at_once, _ = kvjax.prefill(*args, kvjax.Schedule(every=1))
  for one, other in zip(in_blocks.layers, at_once.layers, strict=True):
    np.testing.assert_allclose(one.received, other.received, atol=1e-5)
  sums = np.asarray(in_blocks.layers[0].received).sum(axis=-1)
  np.testing.assert_allclose(sums, [[61, 61], [40, 40], [17, 17]], rtol=1e-5)


def test_what_is_remembered_is_dropped_where_nothing_asks_for_it():
  for name in ("h2o", "snapkv:window=4"):
    for schedule in (kvjax.Schedule(), kvjax.Schedule(block=8)):
      cache, _ = prefill(name, schedule)
      assert cache.layers[0].received is None
      assert cache.layers[0].window is None


def test_lagkv_keeps_its_frozen_part_bit_for_bit():
  schedule = kvjax.Schedule(every=1)
  plan = Plan(LagKV(sinks=2, lag=5), kvjax.Retention(0.4), schedule)
  cache, _ = kvjax.prefill(
    MODEL, PARAMS, PROMPTS, plan.method, plan.budget, schedule
  )
  before = jax.tree.map(np.asarray, cache)
  cache = kvjax.reserve(cache, 60)
  _, after = kvjax.converse(
    MODEL, PARAMS, cache, QUESTIONS, kvjax.Decoding(40), plan=plan
  )
  for old, new in zip(before.layers, after.layers, strict=True):
    for row, n in enumerate((61, 40, 17)):
      frozen = 2 + 2 * ((n - 2) // 5 - 1)
      for name in ("keys", "values", "positions"):
        np.testing.assert_array_equal(
          getattr(new, name)[row, :, :frozen],
          getattr(old, name)[row, :, :frozen],
        )


@pytest.mark.parametrize("size", [1, 4, 5, 12])
def test_lagkv_in_chunks_ends_at_the_length_of_the_plain_prefill(size):
  method, budget = LagKV(sinks=2, lag=5), kvjax.Retention(0.4)
  plain, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, method, budget)
  for first in (None, 12):
    schedule = kvjax.Schedule(block=size, first=first)
    chunked, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, method, budget, schedule)
    np.testing.assert_array_equal(chunked.lengths, plain.lengths)


def test_lagkv_in_chunks_keeps_what_the_plain_prefill_keeps_of_layer_0():
  """The first layer sees the same keys, and what is scored is never late."""
  method, budget = LagKV(sinks=2, lag=5), kvjax.Retention(0.4)
  plain, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, method, budget)
  schedule = kvjax.Schedule(block=5, first=12)
  chunked, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, method, budget, schedule)
  for row in range(3):
    assert held_positions(chunked, row)[0] == held_positions(plain, row)[0]


@pytest.mark.parametrize("name", ["keydiff", "h2o", "snapkv:window=16"])
def test_memory_in_blocks_is_budget_and_block(name):
  """Peak of the compiled program, and the same for a prompt of any length."""
  geometry = dataclasses.replace(MODEL.geometry, layers=8, head_dim=32)
  model = dataclasses.replace(MODEL, geometry=geometry)
  params = jax.eval_shape(model.init)
  budget, block = 128, 32

  def temporary(length):
    schedule = kvjax.Schedule(block=block)
    plan = Plan(get_method(name), kvjax.Tokens(budget), schedule)
    limits = Limits(
      jnp.zeros((8, 1), jnp.int32),
      plan,
      plan.lasting_capacities(length, 8),
    )
    lowered = blocks._prefill_blocks.lower(
      model,
      params,
      jax.ShapeDtypeStruct((1, length), "int32"),
      jax.ShapeDtypeStruct((1,), "int32"),
      limits,
      None,
    )
    used = lowered.compile().memory_analysis()
    return used.temp_size_in_bytes, used.output_size_in_bytes

  slot = 2 * 4 * geometry.head_dim + 4
  layer = geometry.kv_heads * (budget + block) * slot
  used, output = temporary(4096)
  assert output < 8 * geometry.kv_heads * budget * slot * 1.1 + 4096
  # Every layer's budget and block twice (a loop's carry), and one layer's work.
  assert 8 * layer * 0.9 < used < 2 * 8 * layer + 6 * layer
  longer, _ = temporary(65536)
  assert longer - used < 8 * 4 * (65536 - 4096)


@pytest.mark.parametrize(
  ("name", "budget", "sentence"),
  [
    ("compactor", BUDGET, "Compactor cannot evict block by block or while"),
    ("protokv", BUDGET, "ProtoKV cannot evict block by block or while"),
    ("chunkkv", BUDGET, "chunks are those of a whole prompt"),
    ("pyramidkv", BUDGET, "shares out the budget once"),
    ("lagkv", BUDGET, "give a retention in place of 12 tokens"),
    ("lagkv.kvpress", kvjax.Retention(0.5), "ranks a whole prompt at once"),
  ],
)
def test_what_a_paper_does_not_define_is_refused(name, budget, sentence):
  for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=1)):
    with pytest.raises(InputError, match=sentence) as caught:
      kvjax.prefill(MODEL, PARAMS, PROMPTS, get_method(name), budget, schedule)
    assert str(caught.value).endswith(".")


def test_a_schedule_that_makes_no_sense_is_refused():
  with pytest.raises(InputError, match="block must be 1 or more tokens; 0"):
    kvjax.Schedule(block=0)
  with pytest.raises(InputError, match="every must be 1 or more"):
    kvjax.Schedule(every=-1)
  with pytest.raises(InputError, match="give block too"):
    kvjax.Schedule(first=8)


def test_a_sweep_shares_no_pass_with_blocks():
  plan = Plan(get_method("keydiff"), BUDGET, kvjax.Schedule(block=8))
  with pytest.raises(
    InputError, match=r"plan of blocks of 8 to kvjax\.prefill"
  ):
    kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan])


def test_going_on_needs_what_the_prefill_saw():
  cache, logits = prefill("h2o", kvjax.Schedule())
  plan = Plan(get_method("h2o"), BUDGET, kvjax.Schedule(every=1))
  with pytest.raises(InputError, match="prefill with the schedule"):
    kvjax.complete(MODEL, PARAMS, cache, logits, kvjax.Decoding(4), plan=plan)


def test_a_conversation_that_evicts_says_how_much_room_it_needs():
  schedule = kvjax.Schedule(block=8, every=4)
  plan = Plan(get_method("keydiff"), BUDGET, schedule)
  cache, _ = prefill("keydiff", schedule)
  with pytest.raises(InputError, match="need 8 free slots and the cache has 0"):
    kvjax.converse(
      MODEL, PARAMS, cache, QUESTIONS, kvjax.Decoding(9), plan=plan
    )
  cache = kvjax.reserve(cache, 8 + 3)  # tokens since the last eviction
  _, cache = kvjax.converse(
    MODEL, PARAMS, cache, QUESTIONS, kvjax.Decoding(9), plan=plan
  )
  _, cache = kvjax.converse(
    MODEL, PARAMS, cache, QUESTIONS, kvjax.Decoding(9), plan=plan
  )
  assert cache.layers[0].capacity == 12 + 11


def test_the_observation_window_is_the_last_queries_of_each_row():
  schedule = kvjax.Schedule(block=7, every=1)
  cache, _ = prefill("snapkv:window=6", schedule)
  window = cache.layers[0].window
  np.testing.assert_array_equal(
    window.positions,
    [np.arange(n - 6, n) for n in (61, 40, 17)],
  )
  short, _ = prefill("snapkv:window=6", schedule, [[1, 2, 3]])
  np.testing.assert_array_equal(
    short.layers[0].window.positions, [[-1, -1, -1, 0, 1, 2]]
  )


def test_bytes_count_what_is_remembered():
  schedule = kvjax.Schedule(every=1)
  plain, _ = prefill("h2o", kvjax.Schedule())
  knowing, _ = prefill("h2o", schedule)
  assert isinstance(knowing.layers[0], LayerCache)
  slots = 3 * 2 * 12
  assert knowing.nbytes - plain.nbytes == 2 * 4 * slots
  assert jnp.asarray(knowing.layers[0].received).shape == (3, 2, 12)


def rotated_by_order(layer, model, params, rows):
  """The first layer's keys of the tokens held, rotated by their order."""
  expected = np.zeros(layer.keys.shape)
  for row, kept in enumerate(rows):
    for head, tokens in enumerate(kept):
      x = np.asarray(params["embedding"], np.float64)[tokens]
      keys = x @ np.asarray(params["layers"][0]["key"], np.float64)
      keys = keys.reshape(len(tokens), -1, 8)[:, head]
      angles = np.arange(len(tokens))[:, None] * 100.0 ** (-np.arange(4) / 4)
      low, high = keys[:, :4], keys[:, 4:]
      cos, sin = np.cos(angles), np.sin(angles)
      turned = np.concatenate(
        [low * cos - high * sin, high * cos + low * sin], 1
      )
      expected[row, head, : len(tokens)] = turned
  return expected


def test_rerotated_keys_are_those_of_their_places_in_the_cache():
  method = get_method("streaming:rerotate=true")
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, method, BUDGET)
  np.testing.assert_array_equal(cache.next_positions, [12] * 3)
  kept = [[row[:4] + row[-8:]] * 2 for row in ROWS]
  expected = rotated_by_order(cache.layers[0], MODEL, PARAMS, kept)
  np.testing.assert_allclose(cache.layers[0].keys, expected, atol=1e-5)
  assert held_positions(cache, 0) == [[list(range(12))] * 2] * 2
  cache = kvjax.reserve(cache, 40)
  _, cache = kvjax.converse(
    MODEL, PARAMS, cache, QUESTIONS, kvjax.Decoding(5), plan=None
  )
  assert held_positions(cache, 1)[0][0] == list(range(12 + 1 + 5))


def test_keys_are_not_turned_again_and_again():
  method = get_method("streaming:rerotate=true")
  for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=1)):
    with pytest.raises(InputError, match="turns keys once, after a whole"):
      Plan(method, BUDGET, schedule)
  for name in ("pyramid/", "ada/"):
    with pytest.raises(InputError, match="must be the same everywhere"):
      get_method(f"{name}streaming:rerotate=true")


def test_rerotation_needs_a_model_that_can():
  class Plain:
    geometry = MODEL.geometry
    hidden = MODEL.hidden
    logits = MODEL.logits

  method = get_method("streaming:rerotate=true")
  with pytest.raises(InputError, match="Plain has no `rerotated`"):
    kvjax.prefill(Plain(), PARAMS, PROMPTS, method, BUDGET)


@pytest.mark.parametrize("name", ["full", "key_norm:skip_layers=0"])
def test_a_layer_that_keeps_everything_has_room_for_it(name):
  """A short question in a wide block leaves a gap that takes room as well."""
  plan = Plan(get_method(name), BUDGET, kvjax.Schedule(every=1))
  prompts = kvjax.Prompts.of([ROWS[0][:33]], 48)
  cache, _ = kvjax.prefill(
    MODEL, PARAMS, prompts, plan.method, BUDGET, plan.schedule
  )
  question = kvjax.Prompts.of([[5]], 32)
  decoding = kvjax.Decoding(31)
  cache = kvjax.reserve(cache, 63)
  _, cache = kvjax.converse(MODEL, PARAMS, cache, question, decoding, plan=plan)
  assert held_positions(cache, 0)[0] == [list(range(33 + 1 + 31))] * 2


def test_all_of_everything_stays_all_while_decoding():
  schedule = kvjax.Schedule(every=1)
  plan = Plan(get_method("keydiff"), ALL, schedule)
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan.method, ALL, schedule)
  decoding = kvjax.Decoding(8)
  went_on = kvjax.answer(MODEL, PARAMS, cache, QUESTIONS, decoding, plan=plan)
  dense = kvjax.answer(MODEL, PARAMS, cache, QUESTIONS, decoding)
  np.testing.assert_array_equal(went_on.tokens, dense.tokens)


def test_rows_of_unequal_budgets_pool_their_own_neighbours():
  """The shorter row has gaps where the longer one has tokens."""
  method = get_method("snapkv:window=2:kernel=5")
  schedule = kvjax.Schedule(block=8)
  budget = kvjax.Retention(0.4)

  def run(rows):
    prompts = kvjax.Prompts.of(rows, 64)
    return kvjax.prefill(MODEL, PARAMS, prompts, method, budget, schedule)[0]

  together = run(ROWS)
  for row, ids in enumerate(ROWS):
    assert held_positions(run([ids]), 0) == held_positions(together, row)


def test_a_row_that_ends_early_is_left_as_it_would_be_alone():
  schedule = kvjax.Schedule(every=4)
  plan = Plan(get_method("keydiff"), BUDGET, schedule)

  def run(rows, questions, stop):
    cache, _ = kvjax.prefill(
      MODEL, PARAMS, kvjax.Prompts.of(rows, 64), plan.method, BUDGET, schedule
    )
    decoding = kvjax.Decoding(12, stop)
    cache = kvjax.reserve(cache, 16)
    return kvjax.converse(
      MODEL,
      PARAMS,
      cache,
      kvjax.Prompts.of(questions, 8),
      decoding,
      plan=plan,
    )

  free, _ = run(ROWS, ASKED, ())
  stop = (free.rows()[0][1],)
  answers, together = run(ROWS, ASKED, stop)
  lengths = np.asarray(answers.lengths)
  assert lengths[0] <= 1 < lengths.max()
  for row, (ids, question) in enumerate(zip(ROWS, ASKED, strict=True)):
    _, alone = run([ids], [question], stop)
    assert held_positions(alone, 0) == held_positions(together, row)


def test_what_cannot_be_joined_is_refused():
  one, _ = prefill("h2o", kvjax.Schedule())
  other, _ = prefill("h2o", kvjax.Schedule(every=1))
  for caches in ([], [one, other]):
    with pytest.raises(InputError, match="Only caches whose layers have equal"):
      kvjax.concatenate(caches)
