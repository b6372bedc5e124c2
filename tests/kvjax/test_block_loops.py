"""Eviction block by block against loops in float64."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine.forward import hidden_states
from kvjax.model import Geometry
from kvjax.testing import TinyModel, kept_positions

BUDGET = 12
MODEL = TinyModel(Geometry.uniform(1, 4, 2, 8, 4096), vocab_size=4096)
PARAMS = MODEL.init(1)
# Sharp queries with much in common make heavy hitters of some keys; else the
# first tokens would be the heaviest, since most queries have seen them.
PARAMS["embedding"] += 4
PARAMS["layers"][0]["query"] *= 2
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17)]
ASKED = [[64, 65], [66], [67, 68, 69]]
# So hot that every token is another: greedily this model repeats the last.
HOT = kvjax.Sampling(1000.0)
# Over it from the start, one token below it, and far below it.
LIMIT = 20
AROUND = [row[:n] for row, n in zip(ROWS, (29, 19, 9), strict=True)]
NAMES = [
  "keydiff",
  "key_norm",
  "streaming",
  "h2o",
  "h2o.keydiff",
  "tova.keydiff",
  "snapkv:window=4:kernel=1",
]


def compressed(name, rows, budget, block, every):
  """The cache of prompts."""
  schedule = kvjax.Schedule(block=block, every=every)
  prompts = kvjax.Prompts.of(rows, 64)
  plan = kvjax.get_plan(name, kvjax.Tokens(budget), schedule=schedule)
  return kvjax.prefill(MODEL, PARAMS, prompts, plan)[0]


@functools.cache
def prefill(name, block, every):
  """The cache of `ROWS`; both tests ask for the same."""
  return compressed(name, ROWS, BUDGET, block, every)


class Slow:
  """A layer's cache as lists per row and head: the methods by hand, float64.

  Nothing is shared with the package but the activations that it is fed.
  """

  def __init__(self, name, counts):
    self.name, self.counts = name, counts
    self.valid = None  # [row][head] -> list of entries
    self.queries = None  # [row] -> all queries so far, [n, N, D]

  def step(self, seen, evicts=True):
    """Appends a block and evicts, if asked; answers nothing."""
    q, k = (np.asarray(x, np.float64) for x in (seen.queries, seen.keys))
    places = np.asarray(seen.positions)
    rows, kv_heads = k.shape[:2]
    group = q.shape[1] // kv_heads
    if self.valid is None:
      self.valid = [[[] for _ in range(kv_heads)] for _ in range(rows)]
      self.queries = [[] for _ in range(rows)]
    for row in range(rows):
      new = [s for s in range(places.shape[1]) if places[row, s] >= 0]
      self.queries[row] += [q[row, :, s] for s in new]
      for head in range(kv_heads):
        entries = self.valid[row][head]
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
      for head in range(kv_heads) if evicts else ():
        self._evict(row, head, group)

  def _weights(self, queries, entries):
    keys = np.array([e["k"] for e in entries])
    logits = queries @ keys.T / np.sqrt(keys.shape[1])
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)

  def _evict(self, row, head, group):
    entries, count = self.valid[row][head], self.counts[row]
    if len(entries) <= count:
      return
    scores = np.array(self._scores(row, head, group, entries))
    order = sorted(range(len(entries)), key=lambda i: (-scores[i], i))
    kept = sorted(order[:count])
    self.valid[row][head] = [entries[i] for i in kept]

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
    return [[e["p"] for e in entries] for entries in self.valid[row]]


def activations(rows):
  """What the layer sees of rows of tokens, one after another.

  With one layer it does not depend on what attention answers: that is tested
  elsewhere, here the layer's inputs are replayed.
  """
  width = max(map(len, rows))
  tokens = np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
  places = np.arange(width, dtype=np.int32)[None]
  lengths = np.array([[len(row)] for row in rows])
  positions = jnp.asarray(np.where(places < lengths, places, -1))
  found = []

  def replay(layer, state, activations):
    del layer
    found.append(activations)
    return activations.queries, state

  tokens = jnp.asarray(tokens)
  hidden_states(MODEL, PARAMS, tokens, positions, (None,), replay)
  return found[0]


def between(seen, starts, ends):
  """The tokens of each row from its start to its end."""
  places = np.asarray(seen.positions)
  own = (places >= starts[:, None]) & (places < ends[:, None])
  kept = jnp.asarray(np.where(own, places, -1))
  return dataclasses.replace(seen, positions=kept)


def by_hand(name, seen, block, rows=ROWS, budget=BUDGET):
  """The prompt, block by block."""
  slow = Slow(name, [budget] * 3)
  zeros = np.zeros(3, int)
  for start in range(0, max(map(len, rows)), block):
    ends = np.minimum(start + block, [len(row) for row in rows])
    slow.step(between(seen, zeros + start, ends))
  return slow


@pytest.mark.parametrize(
  ("name", "block", "every"),
  [*((name, 7, 1) for name in NAMES), ("keydiff", 1, None), ("h2o", 1, None)],
)
def test_blocks_evict_what_the_loops_evict(name, block, every):
  cache = prefill(name, block, every)
  slow = by_hand(name, activations(ROWS), block)
  for row in range(3):
    assert kept_positions(cache, row)[0] == slow.positions(row)


def answered(cache, rows, new):
  """The cache after the questions and so many tokens, and all tokens."""
  cache = kvjax.reserve(cache, 8 + new)
  questions = kvjax.Prompts.of(ASKED, 8)
  decoding = kvjax.Decoding(new, sampling=HOT)
  answers = kvjax.generate(MODEL, PARAMS, cache, questions, decoding, keep=True)
  said = answers.rows()
  whole = [a + b + c for a, b, c in zip(rows, ASKED, said, strict=True)]
  assert all(len(set(row)) == len(row) for row in whole)
  return answers.cache, whole


def decode_by_hand(slow, seen, rows, new, every):
  """The questions, then token by token."""
  prompts = np.array([len(row) for row in rows])
  ends = prompts + [len(row) for row in ASKED]
  slow.step(between(seen, prompts, ends))
  for step in range(new):
    evicts = (step + 1) % every == 0 or step == new - 1
    slow.step(between(seen, ends + step, ends + step + 1), evicts)


@pytest.mark.parametrize(
  ("name", "every"),
  [
    *(
      pytest.param(
        name,
        1,
        marks=pytest.mark.slow if name in ("key_norm", "h2o.keydiff") else (),
      )
      for name in NAMES
    ),
    ("keydiff", 3),
  ],
)
def test_decoding_evicts_what_the_loops_evict(name, every):
  """After the question, after so many tokens, and after the last."""
  cache = prefill(name, 7, every)
  cache, whole = answered(cache, ROWS, 10)
  seen = activations(whole)
  slow = by_hand(name, seen, 7)
  decode_by_hand(slow, seen, ROWS, 10, every)
  for row in range(3):
    assert kept_positions(cache, row)[0] == slow.positions(row)


@pytest.mark.parametrize(
  ("block", "every"), [(64, 1), (7, 3)], ids=["whole", "blocks"]
)
def test_a_row_below_the_budget_grows_to_it_and_then_keeps_what_differs(
  block, every
):
  """KeyDiff's equations 4 and 6: it evicts only beyond N tokens."""
  cache = compressed("keydiff", AROUND, LIMIT, block, every)
  cache, whole = answered(cache, AROUND, 20)
  seen = activations(whole)
  slow = by_hand("keydiff", seen, block, AROUND, LIMIT)
  held = [len(slow.positions(row)[0]) for row in range(3)]
  assert held == [LIMIT, 19, 9]
  decode_by_hand(slow, seen, AROUND, 20, every)
  for row in range(3):
    kept = kept_positions(cache, row)[0]
    assert [len(head) for head in kept] == [LIMIT] * 2
    assert kept == slow.positions(row)
