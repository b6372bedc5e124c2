"""Real English prose that ships with CPython: the language reference topics.

`pydoc_data.topics` holds about 80 chapters of the Python reference. Some are
held out: training never sees them, evaluation uses nothing else.
"""

import functools
import platform
import re
from collections.abc import Collection, Iterator, Sequence
from pydoc_data import topics
from typing import Literal

Part = Literal["train", "heldout"]

# What tables call the text.
SOURCE = f"pydoc_data.topics of Python {platform.python_version()}"

# What a haystack of prose is made of: a part of the topics, or sentences of
# another text.
Essay = Part | Sequence[str]

# Long enough together for a 4K-token haystack, short enough to leave most of
# the prose to training.
HELDOUT: frozenset[str] = frozenset(
  {
    "assert",
    "assignment",
    "atom-identifiers",
    "attribute-access",
    "calls",
    "context-managers",
    "execmodel",
    "exceptions",
    "global",
    "import",
    "numeric-types",
    "string-methods",
  }
)

_LEAST_WORDS = 8


def _paragraphs(text: str) -> list[str]:
  """Paragraphs of running prose, white space collapsed; no code, no titles."""
  found = []
  for block in re.split(r"\n\s*\n", text):
    paragraph = " ".join(block.split())
    if (
      re.match(r"[A-Z]", paragraph)
      and paragraph.endswith(".")
      and "***" not in paragraph
      and "===" not in paragraph
      and ">>>" not in paragraph
      and "::=" not in paragraph
      and len(paragraph.split()) >= _LEAST_WORDS
    ):
      found.append(paragraph)
  return found


def split_sentences(text: str) -> list[str]:
  """Sentences of `text`; joining them with one blank gives `text` back."""
  return re.split(r"(?<=[.!?]) (?=[A-Z\"(])", text)


@functools.cache
def sentences(part: Part) -> tuple[str, ...]:
  """Sentences of the training or the held-out topics, in topic order.

  Some topics repeat parts of others; a held-out sentence that training sees
  elsewhere is left out.
  """
  if part == "heldout":
    seen = set(sentences("train"))
    return tuple(s for s in _topic_sentences(HELDOUT) if s not in seen)
  return tuple(_topic_sentences(set(topics.topics) - HELDOUT))


def _topic_sentences(names: Collection[str]) -> Iterator[str]:
  for name in sorted(names):
    for paragraph in _paragraphs(topics.topics[name]):
      yield from split_sentences(paragraph)
