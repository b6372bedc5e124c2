"""RULER's variable tracking (NVIDIA/RULER, `variable_tracking.py`).

A chain of assignments is hidden in noise: the first variable gets a number, and
each other variable gets the previous one. The question is for all variables
with this number. A solved example with another chain precedes the text.
"""

import itertools
import random
import string
from collections.abc import Callable, Sequence

from kvjax.experiments.tasks import fitting
from kvjax.experiments.tasks.niah import NOISE
from kvjax.experiments.tasks.sample import Sample

NAME = "vt"
INTRO = (
  "Memorize and track the chain(s) of variable assignment hidden in the "
  "following text.\n\n"
)
QUESTION = (
  "Question: Find all variables that are assigned the value {value} in the "
  "text above."
)
ANSWER_PREFIX = (
  " Answer: According to the chain(s) of variable assignment in the text "
  "above, {number} variables are assigned the value {value}, they are: "
)
MAX_NEW_TOKENS = 30

_VARIABLES = 5
_LETTERS = 5
_EXAMPLE_LETTERS = 3
_EXAMPLE_TOKENS = 500


def sample(rng: random.Random, length: int, count: fitting.Count) -> Sample:
  """Draws a chain of five variables in noise, after a solved example.

  Args:
    rng: source of all draws; equal state gives equal samples.
    length: maximum tokens of context, question, prefix and answer.
    count: counts the tokens of a text, without special tokens.

  Raises:
    TooShortError: `length` is too short for the example and five blocks of
      noise.
  """
  example_value, value = rng.sample(range(10_000, 99_999), 2)
  example = _example(rng, str(example_value), count)
  names = _names(rng, _LETTERS)
  spread = _spread(rng, names, str(value))
  fields = {"value": value, "number": len(names)}
  question = QUESTION.format(**fields)
  prefix = ANSWER_PREFIX.format(**fields)

  def context(blocks: int) -> str:
    return f"{example}\n{INTRO}{spread(blocks)}\n"

  return fitting.fitted(
    NAME,
    context,
    (question, prefix),
    tuple(names),
    MAX_NEW_TOKENS,
    length,
    count,
    least=_VARIABLES,
    metadata={"haystack": "noise"},
  )[0]


def _example(rng: random.Random, value: str, count: fitting.Count) -> str:
  """Draws a full prompt with its answer, in 500 tokens if possible."""
  names = _names(rng, _EXAMPLE_LETTERS)
  spread = _spread(rng, names, value)
  question = QUESTION.format(value=value)
  prefix = ANSWER_PREFIX.format(value=value, number=len(names))

  def text(blocks: int) -> str:
    answer = " ".join(names)
    return f"{INTRO}{spread(blocks)}\n{question}{prefix} {answer}\n"

  least = count(text(_VARIABLES))
  blocks = fitting.most_units(
    lambda n: count(text(n)), max(_EXAMPLE_TOKENS, least), least=_VARIABLES
  )
  return text(blocks)


def _names(rng: random.Random, letters: int) -> list[str]:
  """Draws distinct random names."""
  return fitting.distinct(
    lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), _VARIABLES
  )


def _spread(
  rng: random.Random, names: Sequence[str], value: str
) -> Callable[[int], str]:
  """Returns a function that hides the chain in blocks of noise, in order."""
  chain = [f"VAR {names[0]} = {value}"]
  # As in RULER, copies end with a blank.
  chain += [
    f"VAR {copy} = VAR {source} " for source, copy in itertools.pairwise(names)
  ]
  seed = rng.getrandbits(64)

  def text(blocks: int) -> str:
    lines = [NOISE] * blocks
    places = sorted(random.Random(seed).sample(range(blocks), len(chain)))
    fitting.insert_at(lines, chain, places)
    return "\n".join(lines)

  return text
