"""Whether the answer to a mathematical problem is right."""

import re

from kvjax.experiments.metrics.libraries import library

_BOX = re.compile(r"\\boxed\s*\{")


def is_right(prediction: str, answer: str) -> bool:
  r"""Compares what a text says last with the right answer, as mathematics.

  By Hugging Face's math-verify: 1/2, 0.5 and \frac{1}{2} are equal, and so
  are sets and intervals in other notations. What it cannot read is wrong. If
  there are boxes, the last one counts.

  Raises:
    InputError: math-verify is not installed.
  """
  verifier = library("math_verify")
  last = boxed(prediction)
  found = verifier.parse(prediction if last is None else f"${last}$")
  return bool(verifier.verify(verifier.parse(f"${answer}$"), found))


def boxed(prediction: str) -> str | None:
  r"""Returns what the last \boxed{} of a text holds, empty ones left out."""
  for start in reversed(list(_BOX.finditer(prediction))):
    depth, end = 1, start.end()
    while depth and end < len(prediction):
      depth += (prediction[end] == "{") - (prediction[end] == "}")
      end += 1
    held = prediction[start.end() : end - 1].strip()
    if not depth and held:
      return held
  return None
