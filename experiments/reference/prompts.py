"""The wording of training prompts: RULER's, varied in part of the rows."""

from collections.abc import Callable, Sequence

import numpy as np

from kvjax.experiments.reference.pieces import Pieces
from kvjax.experiments.reference.rows import Row
from kvjax.experiments.tasks import fitting, niah

# Share of rows with wording other than RULER's, against overfitting.
VARIED_SHARE = 0.3
_SHUFFLED_SHARE = 0.3
# Extra tokens for a first word that is longer without its leading blank.
_LINE_START = 12

_NEEDLES = (
  "The special magic {kind} for {key} is {value}.",
  "The {kind} for {key} is: {value}.",
  "Remember that one of the {kind} for {key} is: {value}.",
  "One of the magic {kind} of {key} is {value}.",
)
_QUESTIONS = (
  "What is the {kind} for {query}?",
  "Which special magic {kind} does the text give for {query}?",
  "Find the {kind} for {query} in the text above.",
)
_PREFIXES = (
  " The {kind} for {query} is",
  " The special magic {kind} for {query} is:",
  " The {kind} for {query} mentioned in the text is",
)
_SHORT_NEEDLE = " for {key} is: {value}."
_SHORT_PREFIX = " for {query} mentioned in the provided text is"


class Prompt:
  """The wording of one row.

  Attributes:
    intro: ids of the instruction; empty if the row has none.
    overhead: tokens of the row besides needles and questions.
    short: whether there are only keys and values, no sentences.
  """

  def __init__(
    self,
    rng: np.random.Generator,
    pieces: Pieces,
    form: str,
    hay: str,
    values: str,
    answers: int,
  ):
    """Draws a wording for a row with `answers` values per question."""
    self.pieces = pieces
    self.short = form == "short"
    one = answers == 1
    self._plural = pieces.encode(f" {values}")
    self._kind = pieces.encode(f" {values[:-1] if one else values}")
    needle = niah.NEEDLE
    question = niah.QUESTION_ONE if one else niah.QUESTION
    prefix = niah.ANSWER_PREFIX_ONE if one else niah.ANSWER_PREFIX
    if form == "short":
      needle, question, prefix = _SHORT_NEEDLE, "", _SHORT_PREFIX
    elif rng.random() < VARIED_SHARE:
      if rng.random() < 0.5:
        needle = str(rng.choice(_NEEDLES))
      question = str(rng.choice(_QUESTIONS))
      prefix = str(rng.choice(_PREFIXES))
    if form == "prefix":
      question = ""
    # The tokens of the chat template, if any, between question and answer.
    suffix = "\n" if rng.random() < 0.6 else ""
    if suffix and rng.random() < 0.3:
      prefix = prefix.lstrip()
    joined = hay in ("noise", "needle") and form != "short"
    self._needle = needle if joined else f" {needle.lstrip()}"
    self._question = f"\n{question}{suffix if question else ''}{prefix}"
    self.intro: list[int] = []
    if form == "full" and rng.random() > VARIED_SHARE:
      text = niah.INTRO_ONE if one else niah.INTRO
      self.intro = pieces.fill(text, {"kind": self._kind})
    self.overhead = len(self.intro) + 2

  def needle(self, key: Sequence[int], value: Sequence[int]) -> list[int]:
    """Encodes a needle."""
    fields = {"kind": self._plural, "key": key, "value": value}
    return self.pieces.fill(self._needle, fields)

  def question(self, query: Sequence[int]) -> list[int]:
    """Encodes a newline, the question and the start of the answer."""
    fields = {"kind": self._kind, "query": query}
    return self.pieces.fill(self._question, fields)


def question_turn(
  prompt: Prompt,
  queried: Sequence[Sequence[int]],
  values: Sequence[Sequence[Sequence[int]]],
) -> Row:
  """Builds a question about some keys, and its answer.

  The values of one key are listed in the order of the text, as `1, 2, and 3`.
  With several keys each value follows its key, as `a: 1, b: 2, and c: 3`. Then
  retrieving the next key and its value are two steps, which a small model
  learns much faster. Short prompts omit the keys.
  """
  pieces = prompt.pieces
  row = Row()
  row.add(prompt.question(listing(pieces, queried)[0]))
  items, firsts_in = [], []
  for key, group in zip(queried, values, strict=True):
    for value in group:
      # A value starts with a blank; its first symbol is the next one.
      if len(queried) == 1 or prompt.short:
        items.append(list(value))
        firsts_in.append([1])
      else:
        items.append([*key, *pieces.colon, *value])
        firsts_in.append([0, len(key) + len(pieces.colon) + 1])
  ids, starts = listing(pieces, items)
  firsts = [
    start + place
    for start, places in zip(starts, firsts_in, strict=True)
    for place in places
  ]
  row.add_answer([*ids, *pieces.encode("."), pieces.eos], firsts)
  return row


def listing(
  pieces: Pieces, items: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
  """Encodes `a, b, and c`; returns ids and the start of each item."""
  ids: list[int] = []
  starts = []
  for index, item in enumerate(items):
    if index:
      last = index == len(items) - 1
      ids.extend(pieces.last_comma if last else pieces.comma)
    starts.append(len(ids))
    ids.extend(item)
  return ids, starts


def haystack(
  rng: np.random.Generator,
  pieces: Pieces,
  hay: str,
  inserted: Sequence[Sequence[int]],
  max_tokens: int,
  distractor: Callable[[], list[int]],
) -> list[int]:
  """Builds a haystack with needles at random places.

  Args:
    rng: source of all draws.
    pieces: token ids.
    hay: "noise", "essay" or "needle".
    inserted: needles in the order of the text.
    max_tokens: maximum length of the haystack.
    distractor: draws another needle, for a haystack of needles.
  """
  lines = hay != "essay"
  left = max_tokens - sum(len(ids) + lines for ids in inserted)
  if not lines:
    left -= _LINE_START
  units = list(_units(rng, pieces, hay, left, distractor))
  places = sorted(rng.integers(0, len(units) + 1, len(inserted)).tolist())
  fitting.insert_at(units, [list(ids) for ids in inserted], places)
  ids_of_haystack: list[int] = []
  if not lines:
    units[0] = pieces.without_blank(units[0])
  for index, unit in enumerate(units):
    if lines and index:
      ids_of_haystack.extend(pieces.newline)
    ids_of_haystack.extend(unit)
  return ids_of_haystack


def _units(
  rng: np.random.Generator,
  pieces: Pieces,
  hay: str,
  left: int,
  distractor: Callable[[], list[int]],
) -> list[list[int]]:
  units: list[list[int]] = []
  if hay == "essay":
    total = len(pieces.sentences)
    at = int(rng.integers(total))
    shuffled = rng.random() < _SHUFFLED_SHARE
    while left > 0:
      unit = pieces.sentences[at][:left]
      units.append(unit)
      left -= len(unit)
      at = int(rng.integers(total)) if shuffled else (at + 1) % total
    return units
  noise = pieces.encode(niah.NOISE) if hay == "noise" else []
  while True:
    unit = noise or distractor()
    left -= len(unit) + 1
    if left < 0:
      return units
    units.append(unit)
