"""GGUF files that cannot be loaded get one sentence, whatever they hold."""

import random
import struct

import gguf
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.models.gguf.metadata import read_config
from kvjax.models.gguf.reader import GgufFile
from kvjax.models.gguf.tokenizer import read_tokenizer
from kvjax.models.pretrained import load


def _refused(path, sentence):
  with pytest.raises(InputError, match=sentence) as caught:
    load(path)
  assert "\n" not in str(caught.value)
  assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
  ("fields", "sentence"),
  [
    ({"general.architecture": "gpt2"}, "'gpt2', which is not supported; suppo"),
    (
      {
        "general.architecture": "deepseek2",
        "deepseek2.attention.kv_lora_rank": 512,
      },
      r"latent attention \(MLA\), as 'deepseek2.attention.kv_lora_rank' says",
    ),
    (
      {"general.architecture": "qwen3next", "qwen3next.ssm.conv_kernel": 4},
      r"linear attention or state-space layers \(Mamba\), as 'qwen3next.ssm",
    ),
    ({"split.count": 3}, "one of 3 parts of a model; merge them"),
    ({"llama.block_count": None}, r"lacks the field llama\.block_count"),
    (
      {"llama.block_count": 0},
      r"has 0 for llama\.block_count, which must be a",
    ),
    ({"llama.block_count": 2**30}, r"block_count, but not as many tensors"),
    ({"llama.context_length": 2**31}, "must be a whole number from 1 to 2147"),
    (
      {"llama.attention.head_count_kv": [2, 2]},
      "has a list for llama.attentio",
    ),
    ({"llama.attention.head_count_kv": 3}, "gguf has 4 query heads for 3 KV h"),
    ({"llama.attention.key_length": 6}, r"8 for llama\.attention\.value_len"),
    ({"llama.rope.dimension_count": 4}, "only 8 is supported where heads have"),
    ({"llama.attention.causal": False}, "only True is supported for a decoder"),
    (
      {"llama.attention.sliding_window": 64},
      "sets llama.attention.sliding_win",
    ),
    ({"llama.expert_count": 8}, "sets llama.expert_count to 8, which is not"),
    (
      {"llama.rope.freq_base": -1.0},
      "-1.0 for llama.rope.freq_base, which mus",
    ),
    ({"llama.rope.scaling.type": "longrope"}, "'longrope', which is not suppo"),
    (
      {"llama.rope.scaling.type": "yarn"},
      "lacks the field llama.rope.scaling.",
    ),
    ({"llama.rope.scaling.type": 1}, "1 for llama.rope.scaling.type, which mu"),
    (
      {"llama.embedding_length": 64},
      r"shape \(80, 32\); its metadata asks for",
    ),
    (
      {"tokenizer.ggml.model": "t5"},
      "kind 't5'; only 'gpt2', byte-level BPE, and 'llama', BPE by scores",
    ),
    (
      {"tokenizer.ggml.model": "llama"},
      "must have a finite number in tokenizer.ggml.scores for each of tokeni",
    ),
    (
      {"tokenizer.ggml.pre": "tekken"},
      "'tekken', which is not supported; supp",
    ),
    (
      {"tokenizer.ggml.pre": None},
      "pre-tokenizer None, which is not supported",
    ),
    (
      {"tokenizer.ggml.tokens": None},
      "lacks the texts of tokenizer.ggml.token",
    ),
    (
      {"tokenizer.ggml.merges": None},
      "lacks the texts of tokenizer.ggml.merge",
    ),
    ({"tokenizer.ggml.merges": ["a b c"]}, "must be two tokens and a blank"),
    (
      {"tokenizer.ggml.merges": ["a zz"]},
      "make no tokenizer: .*out of vocabul",
    ),
    (
      {"tokenizer.ggml.token_type": [1]},
      "token_type for each of tokenizer.ggm",
    ),
    (
      {"tokenizer.ggml.bos_token_id": 99},
      "99 for tokenizer.ggml.bos_token_id,",
    ),
    (
      {"tokenizer.ggml.eos_token_id": "x"},
      "'x' for tokenizer.ggml.eos_token_i",
    ),
    ({"tokenizer.chat_template": "{{"}, "The chat template is not valid"),
  ],
)
def test_metadata_that_make_no_model(maker, fields, sentence):
  made = maker()
  made.fields |= fields
  _refused(made.write(), sentence)


def test_a_token_that_is_there_twice(maker):
  made = maker()
  made.fields["tokenizer.ggml.tokens"][3:5] = ["x1", "x1"]
  _refused(made.write(), "has a token twice in tokenizer.ggml.tokens")


def test_tokens_beyond_the_embedding_are_refused_where_a_text_has_them(maker):
  made = maker()
  made.fields["tokenizer.ggml.tokens"] += ["<x1>", "<x2>"]
  made.fields["tokenizer.ggml.token_type"] += [1, gguf.TokenType.USER_DEFINED]
  tokenizer = load(made.write()).text
  assert max(tokenizer.encode("ab")) < 80
  with pytest.raises(InputError, match="'<x2>', whose id is 81, but the model"):
    tokenizer.encode("ab <x2>")


@pytest.mark.parametrize("name", ["eos_token_id", "eot_token_id"])
def test_answers_that_end_with_what_is_not_embedded(maker, name):
  made = maker()
  made.fields["tokenizer.ggml.tokens"] += ["<x1>"]
  made.fields["tokenizer.ggml.token_type"] += [gguf.TokenType.CONTROL]
  made.fields[f"tokenizer.ggml.{name}"] = 80
  _refused(
    made.write(), "ends with the id 80 .*the model embeds 80 tokens only"
  )


def test_fields_that_llama_cpp_does_not_know_are_passed_over(maker):
  made = maker()
  made.fields |= {"llama.own": 1, "llama.expert_count": 0, "other.thing": "x"}
  load(made.write())


def test_tensors_are_named_as_the_file_names_them(maker):
  made = maker()
  name = "model.layers.1.mlp.up_proj.weight"
  whole = made.tensors.pop(name)
  _refused(made.write(), r"gguf lack the tensor blk\.1\.ffn_up\.weight")
  made.tensors[name] = whole[:-1]
  _refused(
    made.write(), r"tensor blk\.1\.ffn_up\.weight in .* has shape \(47, "
  )
  made.tensors[name] = whole
  made.tensors["blk.0.ffn_gate_inp.weight"] = whole
  _refused(made.write(), r"hold the tensor blk\.0\.ffn_gate_inp\.weight, which")
  del made.tensors["blk.0.ffn_gate_inp.weight"]
  load(made.write())
  del made.tensors["model.embed_tokens.weight"]
  _refused(made.write(), r"gguf lack the tensor token_embd\.weight")


def test_other_factors_of_the_rotary_embedding(maker):
  made = maker()
  made.tensors["rope_freqs.weight"] = np.array([1, 1, 2, 3], np.float32)
  _refused(made.write(), "is not that of Llama 3.1 to 3.3, whose scaling of")
  made.fields["llama.rope.scaling.type"] = "linear"
  made.fields["llama.rope.scaling.factor"] = 2.0
  _refused(made.write(), "both rope.scaling.type 'linear' and the tensor rope_")


def _patched(path, name, number):
  """Gives a tensor another code of its format."""
  content = bytearray(path.read_bytes())
  at = content.index(name) + len(name) + 4 + 2 * 8
  (found,) = struct.unpack_from("<I", content, at)
  assert found == gguf.GGMLQuantizationType.F32
  struct.pack_into("<I", content, at, number)
  path.write_bytes(content)


@pytest.mark.parametrize(
  ("number", "sentence"),
  [
    (int(gguf.GGMLQuantizationType.I8), "is stored as I8; only F32, F16, Q4_0"),
    (int(gguf.GGMLQuantizationType.Q8_K), "is stored as Q8_K; only F32, F16, "),
    (77, "is stored as format 77; only F32, F16"),
    (
      int(gguf.GGMLQuantizationType.Q4_K),
      "rows of 32 numbers, which blocks of",
    ),
  ],
)
def test_formats_that_are_not_read(maker, number, sentence):
  path = maker().write()
  _patched(path, b"blk.1.ffn_up.weight", number)
  _refused(path, rf"tensor blk\.1\.ffn_up\.weight .*{sentence}")


@pytest.mark.parametrize(
  ("content", "sentence"),
  [
    (b"", "model.gguf is not a GGUF file"),
    (b"version https://git-lfs.github.com/spec/v1", "is not a GGUF file"),
    (b"GGUF", "is not complete: it ends before its metadata does; fetch it"),
    (b"GGUF" + struct.pack("<I", 1), "is a version 1 GGUF file; only little-"),
    (b"GGUF" + struct.pack(">I", 3), "is a big-endian GGUF file; only little-"),
  ],
)
def test_files_that_are_something_else(tmp_path, content, sentence):
  path = tmp_path / "model.gguf"
  path.write_bytes(content)
  _refused(path, sentence)


def _header(*parts):
  """A file of no tensors and one field, of which these are the bytes."""
  return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"".join(parts)


def _text(content):
  return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize(
  ("content", "sentence"),
  [
    # Counts that would take for ever, and all memory there is.
    (_header(_text(b"x"), struct.pack("<IIQ", 9, 0, 2**60)), "is not complete"),
    (_header(_text(b"x"), struct.pack("<IIQ", 9, 8, 2**60)), "is not complete"),
    (_header(struct.pack("<Q", 2**63)), "is not complete: it ends before its"),
    (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "is not complete"),
    # Arrays of arrays could go as deep as the file is long.
    (_header(_text(b"x"), struct.pack("<IIQ", 9, 9, 1)), "unknown type 9"),
    (
      _header(_text(b"x"), struct.pack("<I", 13)),
      "metadata of the unknown type",
    ),
    (_header(_text(b"\xff")), "has text that is not UTF-8; fetch it again"),
  ],
)
def test_headers_that_claim_what_is_not_there(tmp_path, content, sentence):
  path = tmp_path / "model.gguf"
  path.write_bytes(content)
  _refused(path, sentence)


def test_a_file_that_is_cut_anywhere_is_not_complete(maker):
  path = maker().write()
  whole = path.read_bytes()
  for size in [*range(4, len(whole), 331), len(whole) - 1]:
    path.write_bytes(whole[:size])
    with pytest.raises(
      InputError, match=r"gguf is not complete: it ends befor"
    ):
      GgufFile.open(path)


def test_flipped_bits_raise_nothing_but_sentences(maker):
  """Of the header: those of weights only change them."""
  path = maker().write()
  whole = path.read_bytes()
  draw = random.Random(0)
  sentences = []
  for _ in range(300):
    content = bytearray(whole)
    for _ in range(draw.choice((1, 1, 4))):
      content[draw.randrange(4, 5000)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    try:
      file = GgufFile.open(path)
      read_config(file)
      read_tokenizer(file)
    except InputError as error:
      sentences.append(str(error))
  assert 50 < len(sentences) < 300
  assert all(sentence.endswith(".") for sentence in sentences)


def test_a_file_that_nobody_can_read(tmp_path):
  path = tmp_path / "model.gguf"
  path.symlink_to("/proc/self/mem")
  _refused(path, "model.gguf cannot be read: ")
