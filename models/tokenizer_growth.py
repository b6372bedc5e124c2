"""How much longer a tokenizer may make a text before or after its tokens."""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvjax.errors import InputError

# Public tokenizers clean texts by a few replacements, each of which counts 2 if
# its pattern is a regular expression.
_MOST = 1024
_PARTS = {"normalizer": "normalizers", "decoder": "decoders"}
# Bytes of a character, each of which becomes a character.
_BYTES = 4


def check_growth(backend: tokenizers.Tokenizer) -> None:
  """Refuses steps that together make texts too long.

  Sixty replacements, each of a word by two, are a small file, and exhaust
  memory at the first text. Unicode's normal forms and lower case make texts
  longer once, however often they are applied, and do not count.

  Raises:
    InputError: the normalizer or the decoder could make a text more than 1,024
      times as long.
  """
  for name, children in _PARTS.items():
    part = getattr(backend, name)
    if part is None:
      continue
    # Its attributes are not public in Python; its pickled state is JSON.
    growth = _growth(json.loads(part.__getstate__()), children)
    if growth > _MOST:
      raise InputError(
        f"The {name} in tokenizer.json could make a text more than {_MOST:,} "
        "times as long; repair the tokenizer."
      )


def _growth(part: Mapping[str, Any], children: str) -> float:
  """Bounds the length of a result over that of its text."""
  if children == "normalizers" and part["type"] == "ByteLevel":
    return _BYTES
  if part["type"] == "Sequence":
    return math.prod(_growth(child, children) for child in part[children])
  if part["type"] == "Precompiled":
    texts = _replacements(part["precompiled_charsmap"])
    return max(1, *map(len, texts))
  if part["type"] != "Replace":
    return 1
  content = len(part["content"])
  literal = part["pattern"].get("String")
  # An empty match, as of a*, leaves the character after it.
  return max(1, content / len(literal)) if literal else 1 + content


def _replacements(charsmap: str) -> list[bytes]:
  """Lists what characters become: texts that end with 0, after a trie."""
  data = base64.b64decode(charsmap)
  trie = int.from_bytes(data[:4], "little")
  return data[4 + trie :].split(b"\0")
