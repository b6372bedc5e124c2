"""GGUF files of Gemma 3: windows, norms, scales, and tokens with scores."""

import itertools
import json
import math
import pathlib
import random

import gguf
import jax
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.models.gguf.metadata import config_fields
from kvjax.models.gguf.reader import GgufFile, StoredTensor
from kvjax.models.gguf.tokenizer import read_tokenizer
from kvjax.models.pretrained import load, load_decoder
from kvjax.models.saving import save

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "gemma3_270m"
TEXTS = json.loads((GOLDEN / "texts.json").read_text())
SMALL = TEXTS["small"]
TYPES = gguf.TokenType
BLANK = "\u2581"


@pytest.fixture
def made(maker):
  return maker("gemma3", query_pre_attn_scalar=16)


def _tokenizer(tokens, scores, kinds, **fields):
  fields = {"model": "llama", "tokens": tokens, "scores": scores} | fields
  fields["token_type"] = kinds
  named = {f"tokenizer.ggml.{name}": field for name, field in fields.items()}
  return read_tokenizer(GgufFile(pathlib.Path("small.gguf"), named, {}))


def _small(prefixed):
  return _tokenizer(
    SMALL["tokens"], SMALL["scores"], SMALL["kinds"], add_space_prefix=prefixed
  )


def _of_kind(kind):
  pairs = zip(SMALL["tokens"], SMALL["kinds"], strict=True)
  return [token for token, own in pairs if own == kind]


def test_pieces_are_those_of_sentencepiece():
  tokenizer = _small(prefixed=False)
  for sample, ids in zip(TEXTS["samples"], SMALL["ids"], strict=True):
    text = sample["text"]
    assert tokenizer.encode(text) == ids
    assert "".join(tokenizer.pieces(text)) == text
    for token in _of_kind(TYPES.CONTROL):
      text = text.replace(token, "")
    # SentencePiece cannot tell its own sign for a blank from a blank.
    assert tokenizer.decode(ids) == text.replace(BLANK, " ")


def test_a_blank_before_a_text_is_that_of_sentencepiece():
  tokenizer = _small(prefixed=True)
  count = 0
  for sample, ids in zip(TEXTS["samples"], SMALL["prefixed_ids"], strict=True):
    text = sample["text"]
    # Behind other tokens, llama.cpp puts a blank again.
    if any(token in f" {text}" for token in _of_kind(TYPES.USER_DEFINED)):
      continue
    count += 1
    assert tokenizer.encode(text) == ids
    assert "".join(tokenizer.pieces(text)) == text
    if not any(token in text for token in _of_kind(TYPES.CONTROL)):
      assert tokenizer.decode(ids) == text.replace(BLANK, " ")
  assert count > 10


def _by_hand(text, scores):
  """Joins the leftmost pair of the highest score until there is none."""
  pieces = list(text.replace(" ", BLANK))
  while True:
    joined = [scores.get(a + b) for a, b in itertools.pairwise(pieces)]
    found = [score for score in joined if score is not None]
    if not found:
      return pieces
    at = joined.index(max(found))
    pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


@pytest.mark.parametrize("seed", range(3))
def test_pairs_of_the_highest_score_are_joined_first(seed):
  """In whatever order the vocabulary has them."""
  draw = random.Random(seed)
  letters = "abc" + BLANK
  longer = {
    "".join(draw.choices(letters, k=draw.randint(2, 5))) for _ in "x" * 90
  }
  tokens = [*letters, *sorted(longer)]
  draw.shuffle(tokens)
  scores = [draw.uniform(-9, 9) for _ in tokens]
  known = dict(zip(tokens, scores, strict=True))
  tokenizer = _tokenizer(
    tokens, scores, [TYPES.NORMAL] * len(tokens), add_space_prefix=False
  )
  for _ in range(300):
    text = "".join(draw.choices("abc ", k=draw.randint(1, 60)))
    expected = _by_hand(text, known)
    assert [tokens[i] for i in tokenizer.encode(text)] == expected
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_stand_for_what_is_not_in_the_vocabulary():
  tokenizer = _small(prefixed=False)
  assert "\U0001f999" not in SMALL["tokens"]
  ids = tokenizer.encode("\U0001f999")
  tokens = [SMALL["tokens"][number] for number in ids]
  assert tokens == ["<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]
  assert tokenizer.decode(ids) == "\U0001f999"
  assert tokenizer.decode(ids[:2]) == "\ufffd" * 2
  # Nobody can write a byte, or what takes the place of an unknown token.
  assert len(tokenizer.encode("<0x41>")) > 1
  without = _tokenizer(
    ["<unk>", "a"], [0.0, -1.0], [TYPES.UNKNOWN, TYPES.NORMAL]
  )
  assert without.encode("a\U0001f999") == [0, 1, 0]


@pytest.mark.parametrize(
  "fields",
  [
    {"scores": None},
    {"scores": [0.0]},
    {"scores": ["0"] * 80},
    {"scores": [math.nan] * 80},
    {"add_space_prefix": 1},
  ],
  ids=str,
)
def test_what_makes_no_tokenizer(made, fields):
  for name, value in fields.items():
    made.fields[f"tokenizer.ggml.{name}"] = value
  with pytest.raises(
    InputError, match=r"finite number in tok|which must be true or false\.$"
  ):
    load(made.write())


def test_the_tokenizer_and_the_weights_are_saved(made, tmp_path):
  before = load(made.write())
  text = "<s>abcab  hi 0\n<|turn|>"
  assert 3 not in before.tokenizer.encode(text)
  save(before, tmp_path / "saved")
  after = load(tmp_path / "saved", "float32")
  assert after.config == before.config
  assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
  assert after.tokenizer.eos_ids == before.tokenizer.eos_ids
  assert after.tokenizer.bos == "<s>"
  for one, other in zip(
    jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True
  ):
    np.testing.assert_array_equal(one, other)


def test_windows_and_scales_that_a_file_may_name(made):
  start = "gemma3.attention.sliding_window"
  before = load_decoder(made.write())[0].config
  windows = [layer.window for layer in before.geometry.layers]
  assert windows == [12, 12, None, 12, 12, None, 12]
  made.fields[f"{start}_pattern"] = [w is not None for w in windows]
  assert load_decoder(made.write())[0].config == before
  # As llama.cpp does: every sixth layer has no window.
  made.fields[f"{start}_pattern"] = None
  made.fields["gemma3.rope.freq_base_swa"] = 2e4
  made.fields["gemma3.final_logit_softcapping"] = 30.0
  other = load_decoder(made.write())[0].config
  windows = [layer.window for layer in other.geometry.layers]
  assert windows == [12, 12, 12, 12, 12, None, 12]
  assert (other.local_rope.theta, other.logit_softcap) == (2e4, 30.0)
  assert (before.local_rope.theta, before.logit_softcap) == (1e4, None)
  made.fields[f"{start}_pattern"] = [True] * 3
  with pytest.raises(InputError, match="must be true or false for each of 7 l"):
    load(made.write())
  made.fields[start] = None
  with pytest.raises(
    InputError, match=r"lacks the field gemma3\.attention\.sl"
  ):
    load(made.write())


@pytest.mark.parametrize(
  ("layers", "width", "heads", "head_dim", "scalar"),
  # As published by Google for 1B, 4B, 12B and 27B.
  [
    (26, 1152, 4, 256, 256),
    (34, 2560, 8, 256, 256),
    (48, 3840, 16, 256, 256),
    (62, 5376, 32, 128, 168),
  ],
)
def test_the_scale_of_attention(layers, width, heads, head_dim, scalar):
  fields = {
    "context_length": 131_072,
    "embedding_length": width,
    "block_count": layers,
    "feed_forward_length": 4 * width,
    "attention.head_count": heads,
    "attention.key_length": head_dim,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 1024,
    "rope.freq_base": 1e6,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
  }
  fields = {f"gemma3.{name}": value for name, value in fields.items()}
  fields["general.architecture"] = "gemma3"
  kind = gguf.GGMLQuantizationType.F32
  names = ["token_embd.weight", *(f"blk.{n}.x.weight" for n in range(layers))]
  tensors = {
    name: StoredTensor(kind, (262_208, width), np.zeros((0, 0), np.uint8))
    for name in names
  }
  found = config_fields(GgufFile(pathlib.Path("g.gguf"), fields, tensors))
  assert found["query_pre_attn_scalar"] == scalar
  assert found["rope_parameters"]["factor"] == 8.0
