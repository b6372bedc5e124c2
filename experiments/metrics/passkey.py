"""Metrics of the passkey task (`longctx_bench`, `eval_metrics.py`)."""

import difflib
from collections.abc import Sequence

from kvjax.experiments.metrics.question_answering import normalized
from kvjax.models.tokenizer import Tokenizer


def exact(prediction: str, key: str) -> float:
  """1 where the prediction contains the key, both in normal form, else 0."""
  return float(normalized(key) in normalized(prediction))


def partial(prediction: str, key: str) -> float:
  """Share of the key that the prediction has in one piece."""
  # By default, difflib overlooks what is frequent in 200 characters and more.
  matcher = difflib.SequenceMatcher(None, key, prediction, autojunk=False)
  return matcher.find_longest_match().size / len(key)


def first_key_token(tokenizer: Tokenizer, prompt: str, key: str) -> int | None:
  """Id of the first token of the key, as a reply to this prompt has it.

  It is what follows the prompt in `tokenize(prompt + key)`, so that digits are
  grouped as the tokenizer does it there. A blank stands between the two where
  the prompt does not end with one. As a token of its own it is passed over;
  else it belongs to the key's. Where the tokenizer would join the end of the
  prompt with the key, no reply can say what it joins: then it is the first of
  `tokenize(key)`.

  Args:
    tokenizer: the model's.
    prompt: what stands before the reply, or as much of it as matters.
    key: what is looked for.
  """
  blank = "" if prompt[-1:].isspace() else " "
  asked = tokenizer.encode(prompt)
  whole = tokenizer.encode(prompt + blank + key)
  if whole[: len(asked)] != asked:
    return first_said(tokenizer, tokenizer.encode(key))
  return first_said(tokenizer, whole[len(asked) :])


def first_said(tokenizer: Tokenizer, ids: Sequence[int]) -> int | None:
  """The first token that is no blank; None if there is none."""
  return next((one for one in ids if tokenizer.decode([one]).strip()), None)
