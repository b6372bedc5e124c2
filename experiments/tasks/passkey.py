"""The 64-digit passkey task (Yuan et al. 2024, `longctx_bench`)."""

import random
from collections.abc import Callable

from kvjax.experiments.tasks import fitting, prose
from kvjax.experiments.tasks.sample import Sample

INTRO = (
  "There is an important info hidden inside a lot of irrelevant text. "
  "Find it and memorize it. I will quiz you about the important "
  "information there.\n"
)
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER_PREFIX = " The pass key is"
TEMPLATE_TEXT = (INTRO, NEEDLE, QUESTION, ANSWER_PREFIX)

MAX_NEW_TOKENS = 96


def passkey(
  rng: random.Random,
  length: int,
  count: Callable[[str], int],
  *,
  part: prose.Part = "heldout",
  depth: float | None = None,
  digits: int = 64,
) -> Sample:
  """Draws a key of `digits` digits in prose, stated twice in one sentence.

  Args:
    rng: source of all draws.
    length: maximum tokens of prompt and answer.
    count: counts the tokens of a text.
    part: part of the prose.
    depth: position of the needle from 0, the start, to 1, the end; random if
      None.
    digits: number of digits.

  Raises:
    InputError: `length` is too short for the prompt.
  """
  key = "".join(rng.choice("0123456789") for _ in range(digits))
  place = rng.random() if depth is None else depth
  text = fitting.ProseText(rng, part)

  def context(words: int) -> str:
    sentences = text.sentences(words)
    before = fitting.sentences_before(sentences, place)
    sentences.insert(before, NEEDLE.format(key=key))
    return f"{INTRO}{' '.join(sentences)}\n"

  words = fitting.most_units_of_prompt(
    context,
    length,
    count,
    after=(QUESTION, ANSWER_PREFIX),
    max_new_tokens=MAX_NEW_TOKENS,
  )
  return Sample(
    context=context(words),
    question=QUESTION,
    answer_prefix=ANSWER_PREFIX,
    answers=(key,),
    task="passkey",
    max_new_tokens=MAX_NEW_TOKENS,
    # Samples are averaged by depth, so a random depth is not recorded.
    metadata={"length": length, "depth": depth, "haystack": "essay"},
    metric="passkey",
  )
