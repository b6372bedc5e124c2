"""How much longer a tokenizer may make a text before or after its tokens."""

import json
import math
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvjax.errors import InputError

# The tokenizers of public models replace a character by one to three.
_MOST = 64
_PARTS = {"normalizer": "normalizers", "decoder": "decoders"}


def check_growth(backend: tokenizers.Tokenizer) -> None:
  """Refuses replacements that make texts too long.

  Sixty of them, each of a word by two, are a small file, and exhaust memory at
  the first text.

  Raises:
    InputError: the normalizer or the decoder may make a text more than 64 times
      as long.
  """
  for name, children in _PARTS.items():
    part = getattr(backend, name)
    if part is None:
      continue
    # Its attributes are not public in Python; its pickled state is JSON.
    growth = _growth(json.loads(part.__getstate__()), children)
    if growth > _MOST:
      raise InputError(
        f"The {name} in tokenizer.json may make a text more than {_MOST} times "
        "as long; repair the tokenizer."
      )


def _growth(part: Mapping[str, Any], children: str) -> float:
  """Bounds the length of a result over that of its text."""
  if part["type"] == "Sequence":
    return math.prod(_growth(child, children) for child in part[children])
  if part["type"] != "Replace":
    return 1
  content = len(part["content"])
  literal = part["pattern"].get("String")
  # An empty match, as of a*, leaves the character after it.
  return max(1, content / len(literal)) if literal else 1 + content
