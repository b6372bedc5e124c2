"""Byte-pair encoding by scores, as SentencePiece does it, with `tokenizers`."""

import math
from collections.abc import Mapping, Sequence

import gguf
import tokenizers
from gguf import TokenType
from tokenizers import decoders, models, normalizers

from kvjax.errors import InputError
from kvjax.models.gguf.reader import GgufFile

_KEYS = gguf.Keys.Tokenizer
# What SentencePiece writes for a blank.
_BLANK = "\u2581"


def make_sentencepiece(
  file: GgufFile, vocabulary: Mapping[str, int], kinds: Sequence[int]
) -> tokenizers.Tokenizer:
  """Makes the tokenizer of a vocabulary with scores, without added tokens.

  Of all neighboring pieces of a text that make a piece together, those that
  make the piece of the highest score are joined first. Bytes of characters
  that are not in the vocabulary are tokens themselves. As in llama.cpp, tokens
  of several blanks do not stand for U+2581, the sign for a blank, in a text;
  SentencePiece takes them for that, too.

  Args:
    file: the file.
    vocabulary: ids of all tokens that are used.
    kinds: for each id, its `gguf.TokenType`.

  Raises:
    InputError: there is not a finite score for each token, or an option is
      invalid.
  """
  scores = file.fields.get(_KEYS.SCORES)
  if (
    not isinstance(scores, list)
    or len(scores) != len(kinds)
    or not all(type(x) in (int, float) and math.isfinite(x) for x in scores)
  ):
    raise InputError(
      f"{file.path} must have a finite number in {_KEYS.SCORES} for each of "
      f"{_KEYS.LIST}."
    )
  # llama.cpp takes files without the field for those of Llama 2.
  prefixed = file.fields.get(_KEYS.ADD_PREFIX, True)
  if type(prefixed) is not bool:
    raise InputError(
      f"{file.path} has {prefixed!r} for {_KEYS.ADD_PREFIX}, which must be "
      "true or false."
    )
  backend = tokenizers.Tokenizer(
    models.BPE(
      dict(vocabulary),
      _merges(vocabulary, kinds, scores),
      unk_token=_unknown(file, vocabulary, kinds),
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  replaced = normalizers.Replace(" ", _BLANK)
  decoded = [
    decoders.Replace(_BLANK, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if prefixed:
    backend.normalizer = normalizers.Sequence(
      [normalizers.Prepend(_BLANK), replaced]
    )
    decoded.append(decoders.Strip(" ", left=1, right=0))
  else:
    backend.normalizer = replaced
  backend.decoder = decoders.Sequence(decoded)
  return backend


def _merges(
  vocabulary: Mapping[str, int], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
  """All pairs of pieces that make a piece, those of the best score first.

  Only normal pieces take part; other tokens are cut out of texts before.
  """
  pieces = {
    token: number
    for token, number in vocabulary.items()
    if kinds[number] == TokenType.NORMAL
  }
  found = [
    (-scores[number], end, token)
    for token, number in pieces.items()
    for end in range(1, len(token))
    if token[:end] in pieces and token[end:] in pieces
  ]
  # Of the pairs that make one piece, the one with the shorter first part.
  found.sort()
  return [(token[:end], token[end:]) for _, end, token in found]


def _unknown(
  file: GgufFile, vocabulary: Mapping[str, int], kinds: Sequence[int]
) -> str | None:
  """The token of what has no other, if there is one."""
  number = file.fields.get(_KEYS.UNK_ID)
  for token, own in vocabulary.items():
    if own == number or kinds[own] == TokenType.UNKNOWN:
      return token
  return None
