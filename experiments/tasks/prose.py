"""Real English prose that ships with CPython: the language reference topics.

`pydoc_data.topics` has about 80 chapters of the Python reference. Some are held
out: training never uses them, evaluation uses only them.
"""

import functools
import platform
import re
from collections.abc import Collection, Iterator, Sequence
from pydoc_data import topics
from typing import Literal

Part = Literal["train", "heldout"]

# The name of the text in tables.
SOURCE = f"pydoc_data.topics of Python {platform.python_version()}"

# The source of a prose haystack: a part of the topics, or sentences of another
# text.
Essay = Part | Sequence[str]

# Together long enough for a 4K-token haystack, and short enough to leave most
# of the prose for training.
HELDOUT: frozenset[str] = frozenset(
  {
    *("assert", "assignment", "atom-identifiers", "attribute-access"),
    *("calls", "context-managers", "execmodel", "exceptions", "global"),
    *("import", "numeric-types", "string-methods"),
  }
)

_LEAST_WORDS = 8


def _paragraphs(text: str) -> list[str]:
  """Extracts paragraphs of prose without code and titles."""
  paragraphs = []
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
      paragraphs.append(paragraph)
  return paragraphs


def split_sentences(text: str) -> list[str]:
  """Splits a text into sentences; joining them with a blank restores it."""
  return re.split(r"(?<=[.!?]) (?=[A-Z\"(])", text)


@functools.cache
def sentences(part: Part) -> tuple[str, ...]:
  """Returns sentences of the training or held-out topics, in topic order.

  Topics repeat parts of others. A held-out sentence that also occurs in
  training topics is left out.
  """
  if part == "heldout":
    in_training = set(sentences("train"))
    return tuple(s for s in _topic_sentences(HELDOUT) if s not in in_training)
  return tuple(_topic_sentences(set(topics.topics) - HELDOUT))


def sentences_of(essay: Essay) -> Sequence[str]:
  """Returns the sentences of a haystack's source, in order."""
  return sentences(essay) if isinstance(essay, str) else essay


def _topic_sentences(names: Collection[str]) -> Iterator[str]:
  for name in sorted(names):
    for paragraph in _paragraphs(topics.topics[name]):
      yield from split_sentences(paragraph)
