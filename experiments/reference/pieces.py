"""Token ids of the pieces of training rows."""

import functools
import uuid
from collections.abc import Sequence

import numpy as np
import tokenizers

from kvjax.experiments.reference import vocabulary
from kvjax.experiments.tasks import prose, words

_HEX = "0123456789abcdef"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPELLED_SHARE = 0.15


class Pieces:
  """Encodes templates once and draws keys and values as token ids."""

  def __init__(self, tokenizer: tokenizers.Tokenizer):
    """Encodes the fixed pieces and the training prose with `tokenizer`."""
    self._tokenizer = tokenizer
    specials = (vocabulary.BOS, vocabulary.EOS, vocabulary.PAD)
    self.bos, self.eos, self.pad = (self.encode(s)[0] for s in specials)
    self.newline = self.encode("\n")
    self.comma = self.encode(",")
    self.colon = self.encode(":")
    self.last_comma = self.encode(", and")
    self._blank = self.encode(" ")
    self._hyphen = self.encode("-")
    self._symbols = [self.encode(c)[0] for c in _HEX]
    self._letters = [self.encode(c)[0] for c in _LETTERS]
    self._adjectives = [self.encode(f" {w}") for w in words.ADJECTIVES]
    self._nouns = [self.encode(w) for w in words.NOUNS]
    self.sentences = [self.encode(f" {s}") for s in prose.sentences("train")]
    known = [ids[0] for ids in (*self._adjectives, *self._nouns)]
    running = {i for s in self.sentences for i in s}
    self.any_word = np.asarray(sorted({*known, *running}), np.int32)

  def encode(self, text: str) -> list[int]:
    """Encodes a text, without special tokens."""
    return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

  @functools.cache  # noqa: B019 - one instance exists during training.
  def template(self, text: str) -> tuple[tuple[int, ...] | str, ...]:
    """Encodes a format string as ids with field names between them."""
    parts: list[tuple[int, ...] | str] = []
    for position, piece in enumerate(text.replace("}", "{").split("{")):
      if position % 2:
        parts.append(piece)
      elif piece:
        # A field includes its leading blank.
        last = piece.endswith(" ")
        parts.append(tuple(self.encode(piece[:-1] if last else piece)))
    return tuple(parts)

  def fill(self, text: str, fields: dict[str, Sequence[int]]) -> list[int]:
    """Encodes a template with `fields` filled in."""
    ids: list[int] = []
    for part in self.template(text):
      ids.extend(fields[part] if isinstance(part, str) else part)
    return ids

  def without_blank(self, ids: Sequence[int]) -> list[int]:
    """Removes the leading blank, for the start of a line."""
    text = self._tokenizer.decode(ids[:1]).lstrip(" ")
    return [*self.encode(text), *ids[1:]]

  def word_key(self, rng: np.random.Generator) -> list[int]:
    """Draws ` adjective-noun`; some keys are random letters instead."""
    if rng.random() < SPELLED_SHARE:
      return [
        *self._blank,
        *self._spelled(rng),
        *self._hyphen,
        *self._spelled(rng),
      ]
    return [
      *self._adjectives[rng.integers(len(self._adjectives))],
      *self._hyphen,
      *self._nouns[rng.integers(len(self._nouns))],
    ]

  def _spelled(self, rng: np.random.Generator) -> list[int]:
    count = rng.integers(3, 9)
    return [self._letters[i] for i in rng.integers(0, 26, count)]

  def number(self, rng: np.random.Generator, digits: int) -> list[int]:
    """Draws ` 1234567`: a blank and `digits` digits, no leading zero."""
    drawn = rng.integers(0, 10, digits)
    drawn[0] = rng.integers(1, 10)
    return [*self._blank, *(self._symbols[i] for i in drawn)]

  def digits(self, rng: np.random.Generator, count: int) -> list[int]:
    """Draws a blank and `count` digits, leading zeros allowed."""
    return [*self._blank, *self.string(rng, count, 10)]

  def string(
    self, rng: np.random.Generator, count: int, alphabet: int
  ) -> list[int]:
    """Draws `count` symbols: digits (10), hex digits (16) or letters (26)."""
    source = self._letters if alphabet == 26 else self._symbols
    return [source[i] for i in rng.integers(0, alphabet, count)]

  def uuid(self, rng: np.random.Generator) -> list[int]:
    """Draws a blank and a version-4 UUID, symbol by symbol."""
    digits = "".join(_HEX[i] for i in rng.integers(0, 16, 32))
    return self.encode(f" {uuid.UUID(digits, version=4)}")
