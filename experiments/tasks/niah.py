"""Needle-in-a-haystack tasks in RULER's form (NVIDIA/RULER, `niah.py`).

Wording, key and value types, haystacks and the singular form follow RULER. Keys
come from this project's word lists or from RULER's, essays from CPython's
topics or another text. Unlike in RULER, keys are distinct, so that answers are
unique, and essays start at a random sentence of their text.
"""

import dataclasses
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from kvjax.experiments.tasks import fitting, prose
from kvjax.experiments.tasks.sample import Sample
from kvjax.experiments.tasks.words import BUILT_IN, KeyWords

INTRO = (
  "Some special magic {kind} are hidden within the following text. "
  "Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
)
INTRO_ONE = (
  "A special magic {kind} is hidden within the following text. "
  "Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
)
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
QUESTION = (
  "What are all the special magic {kind} for {query} mentioned in the "
  "provided text?"
)
QUESTION_ONE = (
  "What is the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER_PREFIX = (
  " The special magic {kind} for {query} mentioned in the provided text are"
)
ANSWER_PREFIX_ONE = (
  " The special magic {kind} for {query} mentioned in the provided text is"
)
NOISE = (
  "The grass is green. The sky is blue. The sun is yellow. Here we go. "
  "There and back again."
)
TEMPLATE_TEXT = (
  INTRO,
  INTRO_ONE,
  NEEDLE,
  QUESTION,
  QUESTION_ONE,
  ANSWER_PREFIX,
  ANSWER_PREFIX_ONE,
  NOISE,
  " numbers number uuids uuid words word",
)

Haystack = Literal["noise", "essay", "needle"]
Kind = Literal["words", "numbers", "uuids"]

# Keys with their values, in the order of the text.
_Pairs = Sequence[tuple[str, str]]

# RULER inserts essay needles at some of 40 evenly spaced depths.
_DEPTHS = tuple(index / 39 for index in range(40))


@dataclasses.dataclass(frozen=True)
class NeedleTask:
  """One RULER NIAH task.

  Attributes:
    name: name of the task.
    haystack: text around the needles.
    keys: type of the keys.
    values: type of the values.
    key_count: number of keys.
    values_per_key: values of each key.
    queries: number of keys in a question.
    max_new_tokens: maximum tokens of the answer.
    words: words of keys and values of the type "words".
  """

  name: str
  haystack: Haystack
  keys: Kind = "words"
  values: Kind = "numbers"
  key_count: int = 1
  values_per_key: int = 1
  queries: int = 1
  max_new_tokens: int = 128
  words: KeyWords = BUILT_IN


TASKS: dict[str, NeedleTask] = {
  task.name: task
  for task in (
    NeedleTask("niah_single_1", "noise"),
    NeedleTask("niah_single_2", "essay"),
    NeedleTask("niah_single_3", "essay", values="uuids"),
    NeedleTask("niah_multikey_1", "essay", key_count=4),
    NeedleTask("niah_multikey_2", "needle"),
    NeedleTask("niah_multikey_3", "needle", keys="uuids", values="uuids"),
    NeedleTask("niah_multivalue", "essay", values_per_key=4),
    NeedleTask("niah_multiquery", "essay", key_count=4, queries=4),
  )
}


def draw(rng: random.Random, kind: Kind, words: KeyWords = BUILT_IN) -> str:
  """Draws a key or value of a kind, in RULER's form."""
  if kind == "words":
    return f"{rng.choice(words.adjectives)}-{rng.choice(words.nouns)}"
  if kind == "numbers":
    return str(rng.randint(1_000_000, 9_999_999))
  return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def listing(items: Sequence[str]) -> str:
  """Lists items as RULER does: `a`, `a, and b`, or `a, b, and c`."""
  if len(items) == 1:
    return items[0]
  return f"{', '.join(items[:-1])}, and {items[-1]}"


def sample(
  task: NeedleTask,
  rng: random.Random,
  length: int,
  count: Callable[[str], int],
  *,
  essay: prose.Essay = "heldout",
  depths: Sequence[float] | None = None,
) -> Sample:
  """Draws a sample whose prompt and answer fit `length` tokens.

  Args:
    task: type of needles and haystack.
    rng: source of all draws; equal state gives equal samples.
    length: maximum tokens of context, question, prefix and answer.
    count: counts the tokens of a text, without special tokens.
    essay: text of an essay haystack.
    depths: ascending positions of the needles from 0, the start, to 1, the end;
      random if None.

  Raises:
    InputError: `length` is too short for the task.
  """
  keys, pairs = _pairs(task, rng)
  key_groups = [rng.sample(keys, task.queries)]
  spread = _spread(task, rng, pairs, essay, depths)
  return _samples(task, pairs, key_groups, spread, length, count)[0]


def conversation(
  task: NeedleTask,
  rng: random.Random,
  length: int,
  count: Callable[[str], int],
  *,
  essay: prose.Essay = "heldout",
) -> tuple[Sample, ...]:
  """Draws samples of one context, with a question for each of its keys.

  Needles are evenly spaced and queried in random order. `length` bounds the
  context with all questions and answers. The other arguments are those of
  `sample`.
  """
  keys, pairs = _pairs(task, rng)
  rng.shuffle(keys)
  depths = [(index + 0.5) / len(pairs) for index in range(len(pairs))]
  spread = _spread(task, rng, pairs, essay, depths)
  key_groups = [[key] for key in keys]
  return _samples(task, pairs, key_groups, spread, length, count)


def _pairs(task: NeedleTask, rng: random.Random) -> tuple[list[str], _Pairs]:
  """Draws keys; returns them, and shuffled pairs with their values."""

  def distinct(kind: Kind, number: int) -> list[str]:
    return fitting.distinct(lambda: draw(rng, kind, task.words), number)

  keys = distinct(task.keys, task.key_count)
  pairs = [
    (key, value)
    for key in keys
    for value in distinct(task.values, task.values_per_key)
  ]
  rng.shuffle(pairs)
  return keys, pairs


def _samples(
  task: NeedleTask,
  pairs: _Pairs,
  key_groups: Sequence[Sequence[str]],
  spread: Callable[[int], str],
  length: int,
  count: Callable[[str], int],
) -> tuple[Sample, ...]:
  """Builds one context with a sample for each group of queried keys."""
  one = len(key_groups[0]) * task.values_per_key == 1
  kind = task.values[:-1] if one else task.values
  intro = (INTRO_ONE if one else INTRO).format(kind=kind)
  question = QUESTION_ONE if one else QUESTION
  prefix = ANSWER_PREFIX_ONE if one else ANSWER_PREFIX

  def text(units: int) -> str:
    return f"{intro}{spread(units)}\n"

  queries = [listing(keys) for keys in key_groups]
  turns = [
    (question.format(kind=kind, query=q), prefix.format(kind=kind, query=q))
    for q in queries
  ]
  fixed = sum(
    count(before) + count(after) + task.max_new_tokens
    for before, after in turns
  )
  units = fitting.most_units(lambda n: count(text(n)) + fixed, length)
  context = text(units)
  return tuple(
    Sample(
      context=context,
      question=before,
      answer_prefix=after,
      answers=tuple(
        value for key in keys for other, value in pairs if other == key
      ),
      task=task.name,
      max_new_tokens=task.max_new_tokens,
      metadata={
        "length": length,
        "haystack": task.haystack,
        "keys": tuple(keys),
      },
    )
    for keys, (before, after) in zip(key_groups, turns, strict=True)
  )


def _needle(task: NeedleTask, key: str, value: str) -> str:
  return NEEDLE.format(kind=task.values, key=key, value=value)


def _spread(
  task: NeedleTask,
  rng: random.Random,
  pairs: _Pairs,
  essay: prose.Essay,
  depths: Sequence[float] | None,
) -> Callable[[int], str]:
  """Returns a function that builds a haystack of any number of units.

  All draws are made once, so haystacks of different sizes agree.
  """
  needles = [_needle(task, key, value) for key, value in pairs]
  in_prose = task.haystack == "essay"
  units_of: Callable[[int], list[str]]
  if in_prose:
    units_of = fitting.ProseText(rng, essay).sentences
    shares = depths or sorted(rng.sample(_DEPTHS, len(needles)))
  else:
    units_of = _lines(task, rng, pairs)
    shares = depths or sorted(rng.random() for _ in needles)

  def spread(number: int) -> str:
    units = units_of(number)
    before = [
      # Given depths in prose are shares of words, all others of units.
      fitting.sentences_before(units, share)
      if in_prose and depths
      else int(len(units) * share)
      for share in shares
    ]
    fitting.insert_at(units, needles, before)
    return (" " if in_prose else "\n").join(units)

  return spread


def _lines(
  task: NeedleTask, rng: random.Random, pairs: _Pairs
) -> Callable[[int], list[str]]:
  """Returns a function that gives some lines of noise, or other needles."""
  if task.haystack == "noise":
    return lambda number: [NOISE] * number
  taken = {key for key, _ in pairs}
  needles: list[str] = []

  def others(number: int) -> list[str]:
    while len(needles) < number:
      key = draw(rng, task.keys, task.words)
      if key not in taken:
        taken.add(key)
        value = draw(rng, task.values, task.words)
        needles.append(_needle(task, key, value))
    return needles[:number]

  return others
