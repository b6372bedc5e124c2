"""The lessons of the bundled model: rows of each kind, drawn on the fly."""

import csv
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvjax.experiments.reference.pairs import (
  gapped_pairs,
  listed_pairs,
  plain_pairs,
)
from kvjax.experiments.reference.pieces import Pieces
from kvjax.experiments.reference.prompts import Prompt, haystack, question_turn
from kvjax.experiments.reference.rows import Row
from kvjax.experiments.tasks import passkey as passkey_task

# Number of cue symbols of a string, and the minimum length of a string.
_CUE = 5
_SHORTEST_STRING = 12

Lesson = Callable[[np.random.Generator, Pieces, int], Row]


def copying(rng: np.random.Generator, pieces: Pieces, max_tokens: int) -> Row:
  """Draws random strings of digits, hex digits or letters, each twice."""
  row = Row()
  row.add([pieces.bos])
  longest = min(72, (max_tokens - 6) // 2)
  while True:
    size = int(rng.integers(min(8, longest), longest + 1))
    if len(row) + 2 * size + 4 > max_tokens:
      return row
    string = pieces.string(rng, size, int(rng.choice([10, 16, 26])))
    row.add([*pieces.newline, *string, *pieces.newline])
    row.add_answer(string, [0])


def recalling(rng: np.random.Generator, pieces: Pieces, max_tokens: int) -> Row:
  """Draws many random strings, then repeats them in another order.

  This is dense copying over long distances: the first symbols of a string are
  the cue, the others are scored.
  """
  strings: list[list[int]] = []
  left = (max_tokens - 1) // 2
  while left > _SHORTEST_STRING:
    size = min(int(rng.integers(_SHORTEST_STRING, 65)), left - 1)
    strings.append(pieces.string(rng, size, int(rng.choice([10, 16, 26]))))
    left -= size + 1
  row = Row()
  row.add([pieces.bos])
  for string in strings:
    row.add([*pieces.newline, *string])
  for index in rng.permutation(len(strings)):
    row.add([*pieces.newline, *strings[index][:_CUE]])
    row.add_answer(strings[index][_CUE:], [0])
  return row


@dataclasses.dataclass(frozen=True)
class Retrieval:
  """Needles in a haystack and questions about them, in RULER's wording.

  Attributes:
    hay: "noise", "essay", "needle" or "mixed" (drawn per row).
    keys: "words" or "uuids".
    values: "numbers" or "uuids".
    least_digits: minimum digits of numbers, up to 7.
    key_counts: minimum and maximum number of keys to query.
    value_counts: minimum and maximum values per key.
    query_counts: minimum and maximum keys per question.
    form: "short" (no sentence), "prefix" (no question) or "full".
    tail: maximum share of the row for questions.
    one_turn: share of rows with a single question.
    again: query keys again, in other orders, while tokens remain.
  """

  hay: str = "needle"
  keys: str = "words"
  values: str = "numbers"
  least_digits: int = 7
  key_counts: tuple[int, int] = (1, 1)
  value_counts: tuple[int, int] = (1, 1)
  query_counts: tuple[int, int] = (1, 1)
  form: str = "full"
  tail: float = 0.5
  one_turn: float = 0.3
  again: bool = False

  def __call__(
    self, rng: np.random.Generator, pieces: Pieces, max_tokens: int
  ) -> Row:
    """Draws a row of at most `max_tokens` tokens."""
    hay = self.hay
    if hay == "mixed":
      hay = str(rng.choice(["noise", "essay", "essay", "needle"]))
    digits = int(rng.integers(self.least_digits, 8))
    per_question = _between(rng, self.query_counts)
    values_per_key = _between(rng, self.value_counts)
    keys = max(_between(rng, self.key_counts), per_question)
    prompt = Prompt(
      rng, pieces, self.form, hay, self.values, per_question * values_per_key
    )
    pairs = {
      tuple(self._key(rng, pieces)): [
        self._value(rng, pieces, digits) for _ in range(values_per_key)
      ]
      for _ in range(keys)
    }
    sample_key, sample_values = next(iter(pairs.items()))
    needle_size = len(prompt.needle(sample_key, sample_values[0])) + 2
    question_size = len(
      question_turn(
        prompt, [sample_key] * per_question, [sample_values] * per_question
      )
    )
    space = max_tokens - prompt.overhead - question_size
    most = max(per_question, space // needle_size // values_per_key)
    pairs = dict(list(pairs.items())[:most])
    needles = [(key, value) for key in pairs for value in pairs[key]]
    needles = [needles[i] for i in rng.permutation(len(needles))]
    in_order: dict[tuple[int, ...], list[list[int]]] = {k: [] for k in pairs}
    for key, value in needles:
      in_order[key].append(value)
    stated = [prompt.needle(key, value) for key, value in needles]
    space = max_tokens - prompt.overhead - sum(len(ids) + 1 for ids in stated)
    if rng.random() >= self.one_turn:
      space = min(space, max(question_size, int(self.tail * max_tokens)))
    else:
      space = min(space, question_size)
    names = [list(pairs)[i] for i in rng.permutation(len(pairs))]
    tail = Row()
    while True:
      if len(names) < per_question and self.again:
        names = [list(pairs)[i] for i in rng.permutation(len(pairs))]
      if len(names) < per_question:
        break
      queried, names = names[:per_question], names[per_question:]
      turn = question_turn(prompt, queried, [in_order[key] for key in queried])
      if len(tail) and len(tail) + len(turn) > space:
        break
      tail.extend(turn)

    def distractor() -> list[int]:
      return prompt.needle(
        self._key(rng, pieces), self._value(rng, pieces, digits)
      )

    row = Row()
    row.add([pieces.bos])
    row.add(prompt.intro)
    left = max_tokens - len(row) - len(tail)
    row.add(haystack(rng, pieces, hay, stated, left, distractor))
    row.extend(tail)
    return row

  def _key(self, rng: np.random.Generator, pieces: Pieces) -> list[int]:
    return pieces.uuid(rng) if self.keys == "uuids" else pieces.word_key(rng)

  def _value(
    self, rng: np.random.Generator, pieces: Pieces, digits: int
  ) -> list[int]:
    if self.values == "uuids":
      return pieces.uuid(rng)
    return pieces.number(rng, digits)


def _between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
  return int(rng.integers(bounds[0], bounds[1] + 1))


def passkey(rng: np.random.Generator, pieces: Pieces, max_tokens: int) -> Row:
  """Draws a 64-digit passkey in prose, shorter if 64 digits do not fit."""
  digits = 64 if rng.random() < 0.7 else int(rng.integers(16, 65))
  key = pieces.digits(rng, min(digits, (max_tokens - 60) // 3))
  needle = pieces.fill(f" {passkey_task.NEEDLE}", {"key": key})
  tail = Row()
  tail.add(pieces.newline)
  tail.add(pieces.encode(passkey_task.QUESTION))
  if rng.random() < 0.7:
    tail.add(pieces.newline)
  tail.add(pieces.encode(passkey_task.ANSWER_PREFIX))
  tail.add_answer([*key, *pieces.encode("."), pieces.eos], [1])
  row = Row()
  row.add([pieces.bos])
  if rng.random() < 0.8:
    row.add(pieces.encode(passkey_task.INTRO))
  left = max_tokens - len(row) - len(tail)
  row.add(haystack(rng, pieces, "essay", [needle], left, list))
  row.extend(tail)
  return row


def _retrieval(row: Mapping[str, str]) -> Retrieval:
  def bounds(name: str) -> tuple[int, int]:
    least, most = map(int, row[name].split("-"))
    return least, most

  words = ("hay", "keys", "values", "form")
  counts = ("key_counts", "value_counts", "query_counts")
  fields: dict[str, Any] = {name: row[name] for name in words}
  fields |= {name: bounds(name) for name in counts}
  fields |= {name: float(row[name]) for name in ("tail", "one_turn")}
  return Retrieval(
    **fields, least_digits=int(row["least_digits"]), again=bool(row["again"])
  )


_TABLE = pathlib.Path(__file__).with_name("lessons.tsv").read_text("utf-8")
LESSONS: dict[str, Lesson] = {
  **{"gapped": gapped_pairs, "pairs": plain_pairs, "copy": copying},
  **{"recall": recalling, "listed_pairs": listed_pairs, "passkey": passkey},
  **{
    row["lesson"]: _retrieval(row)
    for row in csv.DictReader(_TABLE.splitlines(), dialect="excel-tab")
  },
}
# Attempts to draw a row that fits.
_MOST_DRAWS = 100


def draw_row(
  name: str, rng: np.random.Generator, pieces: Pieces, max_tokens: int
) -> Row:
  """Draws a row of the named lesson that fits `max_tokens` tokens.

  Raises:
    ValueError: the lesson needs more tokens.
  """
  for _ in range(_MOST_DRAWS):
    row = LESSONS[name](rng, pieces, max_tokens)
    if len(row) <= max_tokens:
      return row
  raise ValueError(f"The lesson {name!r} does not fit {max_tokens} tokens.")
