"""Whether the answer to a mathematical problem is right."""

from kvjax.experiments.metrics.libraries import library


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
  r"""Returns what the last \\boxed{} of a text holds, if there is one."""
  _, found, rest = prediction.rpartition("\\boxed{")
  depth = 1
  for end, letter in enumerate(rest):
    depth += (letter == "{") - (letter == "}")
    if depth == 0:
      return rest[:end].strip() if found else None
  return None
