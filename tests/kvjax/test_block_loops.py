"""Eviction block by block against loops in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods import get_method
from kvjax.plans import Plan
from kvjax.testing import TinyModel, held_positions

MODEL = TinyModel()
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17)]

BUDGET = kvjax.Tokens(12)


def budget_of(name):
  return kvjax.Retention(0.4) if name.startswith("lagkv") else BUDGET


def prefill(name, schedule, rows=ROWS, model=MODEL, params=PARAMS):
  return kvjax.prefill(
    model,
    params,
    kvjax.Prompts.of(rows, 64),
    Plan(get_method(name), budget_of(name), schedule),
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
