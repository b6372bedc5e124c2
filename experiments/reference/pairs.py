"""The first lessons: keys and one-token values, without any sentences."""

import numpy as np

from kvjax.experiments.reference.pieces import Pieces
from kvjax.experiments.reference.prompts import listing
from kvjax.experiments.reference.rows import Row

# Words that may stand between a key and its value in the first lessons, and
# the longer filler of their questions.
_GAP = (" is", " is:", " for", "-", ":")
_QUERY_GAP = " mentioned in the provided text is"


def gapped_pairs(rng: np.random.Generator, pieces: Pieces, room: int) -> Row:
  """Keys and one-token values with 0 to 2 tokens between them.

  The question has a longer filler between key and value than the statement.
  """
  pool = _pool(rng, pieces)
  single = rng.random() < 0.6
  gap = [
    t
    for g in rng.choice(_GAP, rng.integers(0, 3))
    for t in pieces.encode(str(g))
  ][:2]
  query_gap = pieces.encode(_QUERY_GAP) if rng.random() < 0.3 else gap
  if room >= 64 and rng.random() < 0.5:
    query_gap = pieces.encode(_QUERY_GAP)
  key_size = 1 if single else 3
  cost = 2 + len(gap) + len(query_gap)
  pairs = max(2, min((room - 1) // (2 * key_size + cost), 24))
  keys = _keys(rng, pieces, pool, pairs, single)
  while 1 + sum(2 * len(key) + cost for key in keys) > room:
    keys.pop()
  return _asked_once(rng, pieces, pool, keys, gap, query_gap)


def plain_pairs(rng: np.random.Generator, pieces: Pieces, room: int) -> Row:
  """Multi-query associative recall: the value follows its key at once."""
  pool = _pool(rng, pieces)
  pairs = max(2, min((room - 1) // 4, len(pool)))
  keys = _keys(rng, pieces, pool, pairs, single=True)
  return _asked_once(rng, pieces, pool, keys, [], [])


def listed_pairs(rng: np.random.Generator, pieces: Pieces, room: int) -> Row:
  """Questions about two to four keys at once, with one-token values.

  What questions about several keys need, at its densest: `a, b, and c` is
  answered by `1, 2, and 3`.
  """
  pool = _pool(rng, pieces)
  pairs = int(rng.integers(3, 9))
  keys = _keys(rng, pieces, pool, pairs, single=rng.random() < 0.5)
  values = [int(v) for v in rng.choice(pool, pairs)]
  gap = pieces.encode(" is")
  query_gap = pieces.encode(_QUERY_GAP) if rng.random() < 0.5 else gap
  row = _stated(pieces, keys, values, gap, pieces.comma)
  while True:
    asked = rng.permutation(pairs)[: rng.integers(2, 5)]
    query, _ = listing(pieces, [keys[i] for i in asked])
    ids, firsts = listing(pieces, [[values[i]] for i in asked])
    size = len(query) + len(query_gap) + len(ids) + 2
    if row.answers and len(row) + size > room:
      return row
    row.add([*pieces.newline, *query, *query_gap])
    row.add_answer([*ids, pieces.eos], firsts)


def _pool(rng: np.random.Generator, pieces: Pieces) -> np.ndarray:
  """A small or the whole vocabulary; both, since neither alone suffices."""
  if rng.random() < 0.5:
    return pieces.any_word[:: len(pieces.any_word) // 64]
  return pieces.any_word


def _keys(
  rng: np.random.Generator,
  pieces: Pieces,
  pool: np.ndarray,
  count: int,
  single: bool,
) -> list[list[int]]:
  """Distinct tokens of the pool, or keys of two words."""
  if single:
    return [[int(k)] for k in rng.choice(pool, count, replace=False)]
  return [pieces.word_key(rng) for _ in range(count)]


def _stated(
  pieces: Pieces,
  keys: list[list[int]],
  values: list[int],
  gap: list[int],
  end: list[int],
) -> Row:
  """A new row that gives each key with its one-token value."""
  row = Row()
  row.add([pieces.bos])
  for key, value in zip(keys, values, strict=True):
    row.add([*key, *gap, value, *end])
  return row


def _asked_once(
  rng: np.random.Generator,
  pieces: Pieces,
  pool: np.ndarray,
  keys: list[list[int]],
  gap: list[int],
  query_gap: list[int],
) -> Row:
  """Keys with drawn values, then each key once more as a question."""
  values = [int(v) for v in rng.choice(pool, len(keys))]
  row = _stated(pieces, keys, values, gap, [])
  for index in rng.permutation(len(keys)):
    row.add([*keys[index], *query_gap])
    row.add_answer([values[index]], [0])
  return row
