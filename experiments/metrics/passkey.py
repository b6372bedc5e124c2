"""Metrics of the passkey task (`longctx_bench`, `eval_metrics.py`)."""

import difflib
from collections.abc import Sequence

from kvjax.experiments.metrics.longbench import normalize
from kvjax.models.tokenizer import Tokenizer


def exact(prediction: str, key: str) -> float:
  """Returns 1 if the normalized prediction contains the key, else 0."""
  return float(normalize(key) in normalize(prediction))


def partial(prediction: str, key: str) -> float:
  """Computes the share of the key in its longest match in the prediction."""
  # By default, difflib ignores frequent characters in long texts.
  matcher = difflib.SequenceMatcher(None, key, prediction, autojunk=False)
  return matcher.find_longest_match().size / len(key)


def first_key_token(tokenizer: Tokenizer, prompt: str, key: str) -> int | None:
  """Returns the id of the key's first token in a reply to a prompt.

  It is the token after the prompt in `tokenize(prompt + key)`, so that digits
  are grouped as in a reply. A blank separates the two unless the prompt ends
  with one. If the blank is a separate token, it is skipped. If the tokenizer
  would merge the end of the prompt with the key, which no reply can produce,
  the result is the first token of `tokenize(key)`.

  Args:
    tokenizer: the model's tokenizer.
    prompt: the text before the reply, or its relevant end.
    key: the key.
  """
  blank = "" if prompt[-1:].isspace() else " "
  prompt_ids = tokenizer.encode(prompt)
  full_ids = tokenizer.encode(prompt + blank + key)
  if full_ids[: len(prompt_ids)] != prompt_ids:
    return first_nonblank_token(tokenizer, tokenizer.encode(key))
  return first_nonblank_token(tokenizer, full_ids[len(prompt_ids) :])


def first_nonblank_token(
  tokenizer: Tokenizer, ids: Sequence[int]
) -> int | None:
  """Returns the first token that is not blank; None if there is none."""
  return next(
    (token for token in ids if tokenizer.decode([token]).strip()), None
  )
