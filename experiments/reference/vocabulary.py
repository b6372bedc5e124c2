"""The bundled model's tokenizer: a known word is one token, others are bytes.

Nothing is trained or downloaded. The format is Llama 3's: byte-level BPE with
`ignore_merges`, here without any merges. A piece of text in the vocabulary is
one token; any other piece is its UTF-8 bytes.
"""

import collections
import re
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from kvjax.experiments.tasks import niah, passkey, prose, words

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SIZE = 3328

# A word includes its leading blank, unless a digit follows. A UUID that starts
# with letters is then a blank and single symbols, like all other UUIDs.
_PIECE = r" \p{L}++(?!\p{N})|\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]"
_PIECE_RE = r" [A-Za-z]+|[A-Za-z]+|[’“”—…]"
_HEX = frozenset("abcdef")


def _prose_pieces() -> list[str]:
  """Lists pieces of the training topics, the most frequent first."""
  counts = collections.Counter(
    piece
    for sentence in prose.sentences("train")
    for piece in re.findall(_PIECE_RE, f" {sentence}")
  )
  return sorted(counts, key=lambda piece: (-counts[piece], piece))


def _known_pieces() -> list[str]:
  """Lists pieces that are one token, in the order of their ids."""
  templates = " ".join((*niah.TEMPLATE_TEXT, *passkey.TEMPLATE_TEXT))
  pieces = [
    *re.findall(_PIECE_RE, templates),
    *(f" {word}" for word in words.ADJECTIVES),
    *words.NOUNS,
    *_prose_pieces(),
  ]
  # Hex letters inside a UUID must remain single symbols.
  known = (p for p in pieces if len(p) > 1 and not set(p.lower()) <= _HEX)
  return list(dict.fromkeys(known))


def build() -> tokenizers.Tokenizer:
  """Builds the tokenizer deterministically, with `SIZE` entries."""
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  specials = [BOS, EOS, PAD]
  # 256 of them represent bytes.
  characters = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = dict.fromkeys([*specials, *characters])
  for piece in _known_pieces():
    if len(vocabulary) == SIZE:
      break
    ((shown, _),) = byte_level.pre_tokenize_str(piece)
    vocabulary[shown] = None
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      {piece: index for index, piece in enumerate(vocabulary)},
      merges=[],
      ignore_merges=True,
    )
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(tokenizers.Regex(_PIECE), "isolated"), byte_level]
  )
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(
    [AddedToken(token, special=True, normalized=False) for token in specials]
  )
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{BOS} $A",
    pair=f"{BOS} $A $B",
    special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
  )
  return tokenizer


def config(longest: int) -> dict[str, Any]:
  """Returns tokenizer_config.json for a context of `longest` tokens."""
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "clean_up_tokenization_spaces": False,
    "model_max_length": longest,
  }
