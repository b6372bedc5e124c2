"""Tokenizers that break off get one sentence, when they are loaded or used."""

import base64
import json
import struct

import pytest
import tokenizers
from odd_files import refused

from kvjax.errors import InputError
from kvjax.models.tokenizer import Tokenizer

WORDS = {"<u>": 0, "w1": 1, "</s>": 2}


def _split(pattern):
  return {
    "type": "Split",
    "pattern": {"Regex": pattern},
    "behavior": "Isolated",
    "invert": False,
  }


def _charsmap(text):
  return {"type": "Precompiled", "precompiled_charsmap": text}


# Those that cannot be loaded.
BROKEN = {
  "no charsmap": {"normalizer": _charsmap("")},
  "a short charsmap": {"normalizer": _charsmap("AAAA")},
  "a charsmap of nothing": {"normalizer": _charsmap("CAAAAAAA")},
  "a pattern": {"pre_tokenizer": _split("(")},
  "no unknown": {"model": {"type": "Unigram", "unk_id": 0, "vocab": []}},
  "far unknown": {
    "model": {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}
  },
  "dropout": {
    "model": {"type": "BPE", "dropout": 5.0, "vocab": WORDS, "merges": []}
  },
  "a merge": {"model": {"type": "BPE", "vocab": WORDS, "merges": [["a", "b"]]}},
  "no character": {
    "pre_tokenizer": {
      "type": "Metaspace",
      "replacement": "",
      "add_prefix_space": True,
      "prepend_scheme": "first",
    }
  },
  "no decoder": {"decoder": {"type": "Nothing"}},
  "an id": {"model": {"type": "WordLevel", "vocab": {"a": 2**32}}},
  "an id below": {"model": {"type": "WordLevel", "vocab": {"a": -1}}},
  "depth": {
    "normalizer": json.loads(
      '{"type":"Sequence","normalizers":[' * 90 + '{"type":"NFC"}' + "]}" * 90
    )
  },
}
# Those that fail for a text.
FAILING = {
  "no unknown word": ({"model": {"type": "WordLevel", "vocab": WORDS}}, "a"),
  "no unknown piece": (
    {
      "model": {
        "type": "Unigram",
        "unk_id": None,
        "vocab": [[word, 0.0] for word in WORDS],
      }
    },
    "a",
  ),
  "a lost word": (
    {
      "model": {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 0,
        "vocab": WORDS,
      }
    },
    "a",
  ),
  "no length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "a"),
  "a pattern without end": ({"pre_tokenizer": _split("(x+x+)+y")}, "x" * 3000),
}


def write(folder, fields):
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(WORDS, unk_token="<u>")
  )
  content = json.loads(backend.to_str())
  if "model" in fields and fields["model"]["type"] == "WordLevel":
    fields = fields | {"model": fields["model"] | {"unk_token": "[UNK]"}}
  (folder / "tokenizer.json").write_text(json.dumps(content | fields))
  return folder


@pytest.mark.parametrize("kind", BROKEN)
def test_a_tokenizer_that_cannot_be_loaded(tmp_path, kind):
  folder = write(tmp_path, BROKEN[kind])
  refused(lambda: Tokenizer.load(folder), "is not a tokenizer: .*; repair the")


def replace(pattern, content):
  return {"type": "Replace", "pattern": pattern, "content": content}


def mapped(text):
  """A charsmap, as SentencePiece writes it, from the letter a to a text."""
  # A trie of units: its root, the letter's with the flag of a leaf, the leaf,
  # which is the text's place. A unit's children are at its offset, bits 10 on.
  units = [256 << 10, *[0] * 1023]
  letter = 256 ^ ord("a")
  units[letter] = 512 << 10 | 1 << 8 | ord("a")
  units[letter ^ 512] = 1 << 31
  trie = struct.pack("<1024I", *units)
  data = struct.pack("<I", len(trie)) + trie + text.encode() + b"\0"
  return _charsmap(base64.b64encode(data).decode())


DOUBLED = [replace({"String": "a"}, "aa")] * 60
GROWING = {
  "normalizer": {"type": "Sequence", "normalizers": DOUBLED},
  "decoder": {"type": "Sequence", "decoders": DOUBLED},
  "nested": {
    "type": "Sequence",
    "normalizers": [
      replace({"String": "a"}, "a" * 40),
      {"type": "Sequence", "normalizers": [replace({"Regex": "b*"}, "a" * 40)]},
    ],
  },
  "everywhere": replace({"String": ""}, "a" * 1024),
  "bytes": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 6},
  "charsmap": {"type": "Sequence", "normalizers": [mapped("a" * 40)] * 2},
}


@pytest.mark.parametrize("kind", GROWING)
def test_a_tokenizer_that_makes_texts_too_long(tmp_path, kind):
  part = "decoder" if kind == "decoder" else "normalizer"
  folder = write(tmp_path, {part: GROWING[kind]})
  refused(
    lambda: Tokenizer.load(folder),
    f"The {part} in tokenizer.json could make a text more than 1,024 times",
  )


def test_replacements_of_public_tokenizers_are_allowed(tmp_path):
  usual = [
    replace({"String": " "}, "\u2581"),
    replace({"Regex": " {2,}"}, "\u2581"),
    replace({"String": "``"}, '"'),
    {"type": "NFKC"},
    {"type": "Lowercase"},
    *[replace({"Regex": r"\s{3,}"}, " ")] * 6,
  ]
  tokenizer = Tokenizer.load(
    write(tmp_path, {"normalizer": {"type": "Sequence", "normalizers": usual}})
  )
  assert tokenizer.encode("w1") == [WORDS["w1"]]


def test_charsmaps_are_applied_and_bounded(tmp_path):
  part = {"type": "Sequence", "normalizers": [mapped("w1")] * 2}
  tokenizer = Tokenizer.load(write(tmp_path, {"normalizer": part}))
  assert tokenizer.encode("a") == [WORDS["w1"]]


@pytest.mark.parametrize("kind", FAILING)
def test_a_tokenizer_that_fails_for_a_text(tmp_path, kind):
  fields, text = FAILING[kind]
  tokenizer = Tokenizer.load(write(tmp_path, fields))
  for function in (tokenizer.encode, tokenizer.count, tokenizer.pieces):
    refused(
      lambda function=function: function(text),
      "The tokenizer does not encode the text: .*; repair the tokenizer",
    )


def test_a_tokenizer_that_fails_for_tokens(tmp_path):
  decoder = {"type": "Replace", "pattern": {"Regex": "(w+w+)+y"}, "content": ""}
  # Longer and longer words, until the pattern goes back too often.
  vocab = {"w" * 2**n: n for n in range(12)}
  fields = {
    "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w"},
    "decoder": decoder,
  }
  tokenizer = Tokenizer.load(write(tmp_path, fields))
  refused(
    lambda: tokenizer.decode([11]),
    "The tokenizer does not decode the tokens: .*; repair the tokenizer",
  )


@pytest.mark.parametrize("ids", [[-1], [1, 2**32]])
def test_what_is_no_token_id_is_not_decoded(tmp_path, ids):
  tokenizer = Tokenizer.load(write(tmp_path, {}))
  refused(lambda: tokenizer.decode(ids), "Token ids are from 0 to 4294967295")


@pytest.mark.parametrize(
  "token", ["", "a\nb", "\x1b[2J", "<s>" * 9999], ids=range(4)
)
def test_special_tokens_that_are_not_there(tmp_path, token):
  folder = write(tmp_path, {})
  path = folder / "tokenizer_config.json"
  path.write_text(json.dumps({"bos_token": token}))
  refused(lambda: Tokenizer.load(folder), "bos_token .*, which tokenizer.json")
  with pytest.raises(InputError) as caught:
    Tokenizer.load(folder)
  assert len(str(caught.value)) < 200
