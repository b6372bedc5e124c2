"""The first lessons: keys and one-token values, without sentences."""

import numpy as np

from kvjax.experiments.reference.pieces import Pieces
from kvjax.experiments.reference.prompts import listing
from kvjax.experiments.reference.rows import Row

# Words between a key and its value in the first lessons, and the longer filler
# of their questions.
_GAP = (" is", " is:", " for", "-", ":")
_QUERY_GAP = " mentioned in the provided text is"


def gapped_pairs(
  rng: np.random.Generator, pieces: Pieces, max_tokens: int
) -> Row:
  """Draws keys and one-token values with 0 to 2 tokens between them.

  The filler between key and value is longer in the question.
  """
  pool = _pool(rng, pieces)
  single = rng.random() < 0.6
  gap = [
    t
    for g in rng.choice(_GAP, rng.integers(0, 3))
    for t in pieces.encode(str(g))
  ][:2]
  query_gap = pieces.encode(_QUERY_GAP) if rng.random() < 0.3 else gap
  if max_tokens >= 64 and rng.random() < 0.5:
    query_gap = pieces.encode(_QUERY_GAP)
  key_size = 1 if single else 3
  cost = 2 + len(gap) + len(query_gap)
  pairs = max(2, min((max_tokens - 1) // (2 * key_size + cost), 24))
  keys = _keys(rng, pieces, pool, pairs, single)
  while 1 + sum(2 * len(key) + cost for key in keys) > max_tokens:
    keys.pop()
  return _query_once(rng, pieces, pool, keys, gap, query_gap)


def plain_pairs(
  rng: np.random.Generator, pieces: Pieces, max_tokens: int
) -> Row:
  """Draws multi-query associative recall: a value directly follows its key."""
  pool = _pool(rng, pieces)
  pairs = max(2, min((max_tokens - 1) // 4, len(pool)))
  keys = _keys(rng, pieces, pool, pairs, single=True)
  return _query_once(rng, pieces, pool, keys, [], [])


def listed_pairs(
  rng: np.random.Generator, pieces: Pieces, max_tokens: int
) -> Row:
  """Draws questions about two to four keys at once, with one-token values.

  This is the core of questions about several keys: the answer to `a, b, and c`
  is `1, 2, and 3`.
  """
  pool = _pool(rng, pieces)
  pairs = int(rng.integers(3, 9))
  keys = _keys(rng, pieces, pool, pairs, single=rng.random() < 0.5)
  values = [int(v) for v in rng.choice(pool, pairs)]
  gap = pieces.encode(" is")
  query_gap = pieces.encode(_QUERY_GAP) if rng.random() < 0.5 else gap
  row = _state_pairs(pieces, keys, values, gap, pieces.comma)
  while True:
    queried = rng.permutation(pairs)[: rng.integers(2, 5)]
    query, _ = listing(pieces, [keys[i] for i in queried])
    ids, firsts = listing(pieces, [[values[i]] for i in queried])
    size = len(query) + len(query_gap) + len(ids) + 2
    if row.answers and len(row) + size > max_tokens:
      return row
    row.add([*pieces.newline, *query, *query_gap])
    row.add_answer([*ids, pieces.eos], firsts)


def _pool(rng: np.random.Generator, pieces: Pieces) -> np.ndarray:
  """Draws a small pool or the full vocabulary; training needs both."""
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
  """Draws distinct tokens of the pool, or keys of two words."""
  if single:
    return [[int(k)] for k in rng.choice(pool, count, replace=False)]
  return [pieces.word_key(rng) for _ in range(count)]


def _state_pairs(
  pieces: Pieces,
  keys: list[list[int]],
  values: list[int],
  gap: list[int],
  end: list[int],
) -> Row:
  """Builds a row that states each key with its one-token value."""
  row = Row()
  row.add([pieces.bos])
  for key, value in zip(keys, values, strict=True):
    row.add([*key, *gap, value, *end])
  return row


def _query_once(
  rng: np.random.Generator,
  pieces: Pieces,
  pool: np.ndarray,
  keys: list[list[int]],
  gap: list[int],
  query_gap: list[int],
) -> Row:
  """Builds a row of keys with values, then each key once as a question."""
  values = [int(v) for v in rng.choice(pool, len(keys))]
  row = _state_pairs(pieces, keys, values, gap, [])
  for index in rng.permutation(len(keys)):
    row.add([*keys[index], *query_gap])
    row.add_answer([values[index]], [0])
  return row
