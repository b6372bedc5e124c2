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

_DIGITS = 64
MAX_NEW_TOKENS = 96
OFFICIAL_MAX_NEW_TOKENS = 256


def passkey(
  rng: random.Random,
  length: int,
  count: Callable[[str], int],
  *,
  essay: prose.Essay = "heldout",
  depth: float | None = None,
  official: bool = False,
) -> Sample:
  """Draws a key of 64 digits in prose, stated twice in one sentence.

  Args:
    rng: source of all draws.
    length: maximum tokens of prompt and answer.
    count: counts the tokens of a text.
    essay: the prose in which the key is hidden.
    depth: position of the needle from 0, the start, to 1, the end; random if
      None.
    official: give the answer as many tokens as `longctx_bench` does, end the
      start of the answer with a blank, and begin the question with the line
      break before it.

  Raises:
    InputError: `length` is too short for the prompt.
  """
  key = "".join(rng.choice("0123456789") for _ in range(_DIGITS))
  place = rng.random() if depth is None else depth
  text = fitting.ProseText(rng, essay)
  end, question, prefix = "\n", QUESTION, ANSWER_PREFIX
  max_new_tokens = MAX_NEW_TOKENS
  if official:
    end, question, prefix = "", f"\n{QUESTION}", f"{ANSWER_PREFIX} "
    max_new_tokens = OFFICIAL_MAX_NEW_TOKENS

  def context(words: int) -> str:
    sentences = text.sentences(words)
    before = fitting.sentences_before(sentences, place)
    sentences.insert(before, NEEDLE.format(key=key))
    return f"{INTRO}{' '.join(sentences)}{end}"

  return fitting.fitted(
    "passkey",
    context,
    (question, prefix),
    (key,),
    max_new_tokens,
    length,
    count,
    # Samples are averaged by depth, so a random depth is not recorded.
    metadata={"depth": depth, "haystack": "essay"},
    metric="passkey",
    key=key,
  )[0]


def length_of_words(
  words: int, count: Callable[[str], int], essay: prose.Essay = "heldout"
) -> int:
  """Computes the tokens of an official sample with so many words of prose.

  `longctx_bench` counts words. The tokenizer determines how many tokens they
  are, here on average over all of the prose.
  """
  text = " ".join(prose.sentences_of(essay))
  tokens_per_word = count(text) / len(text.split())
  needle = NEEDLE.format(key="0123456789" * 6 + "0123")
  around = f"{INTRO}{needle}\n{QUESTION}{ANSWER_PREFIX} "
  tokens = count(around) + round(tokens_per_word * words)
  return tokens + OFFICIAL_MAX_NEW_TOKENS
