"""GGUF files load as Hugging Face directories of the same weights do."""

import json
import math
import pathlib

import gguf
import jax
import numpy as np
import pytest

from kvjax.cache.sharding import parse_mesh
from kvjax.engine.sampling import GREEDY
from kvjax.errors import InputError
from kvjax.models.gguf.reader import GgufFile, can_dequantize
from kvjax.models.gguf.tokenizer import read_tokenizer
from kvjax.models.pretrained import load, load_decoder
from kvjax.models.saving import save

LLAMA3 = dict(
  rope_parameters=dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
  )
)
YARN = dict(
  rope_parameters=dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=32,
  )
)


def _assert_equal_models(one, other):
  assert one[0] == other[0]
  assert jax.tree.structure(one[1]) == jax.tree.structure(other[1])
  leaves = zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True)
  for a, b in leaves:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  ("family", "config"),
  [
    ("llama3", {}),
    ("llama31", LLAMA3),
    ("llama32", LLAMA3),
    ("llama_linear", {}),
    ("llama_yarn", YARN),
    ("llama_biases", {}),
    ("yi", {}),
    ("qwen25", {}),
    ("qwen25_tied", {}),
    ("qwen25_yarn", {}),
    ("qwen3", {}),
    # Files cannot say another scale of attention.
    ("gemma3", {"query_pre_attn_scalar": 16}),
  ],
)
def test_a_file_loads_as_the_directory_does(maker, family, config):
  made = maker(family, **config)
  made.write()
  whole = load_decoder(made.directory, "float32")
  _assert_equal_models(load_decoder(made.path), whole)


# Blocks of 32 numbers; the other formats have 256, which no toy has.
@pytest.mark.parametrize(
  "kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
)
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_every_format_is_dequantized_as_the_library_does(maker, family, kind):
  made = maker(family, kind)
  made.write()
  assert made.kind in {
    tensor.kind for tensor in GgufFile.open(made.path).tensors.values()
  }
  for dtype in ("float32", "bfloat16"):
    whole = load_decoder(made.directory, dtype)
    _assert_equal_models(load_decoder(made.path, dtype), whole)


def test_devices_read_their_parts_of_quantized_tensors(maker):
  made = maker("llama31", "Q8_0", **LLAMA3)
  made.write()
  mesh = parse_mesh("data:2,model:2")
  whole = load_decoder(made.path)
  _assert_equal_models(load_decoder(made.path, mesh=mesh), whole)


def test_rows_of_queries_are_in_another_order_in_the_file(maker):
  """Else the tests above would not see whether they are put back."""
  made = maker()
  file = GgufFile.open(made.write())
  name = "model.layers.0.self_attn.q_proj.weight"
  own = file.tensors["blk.0.attn_q.weight"].data.view(np.float32)
  assert own.shape == made.tensors[name].shape
  assert not np.array_equal(own, made.tensors[name])
  np.testing.assert_array_equal(own[1], made.tensors[name][4])


def test_the_header_is_read_as_the_library_reads_it(maker):
  made = maker("qwen25", "Q4_1")
  made.fields |= {
    "general.name": "Größe",
    "general.languages": ["en", "de"],
    "test.flag": True,
    "test.numbers": [1.5, -2.0],
    "test.large": 7,
  }
  path = made.write()
  file, reader = GgufFile.open(path), gguf.GGUFReader(path)
  theirs = {
    name: field.contents()
    for name, field in reader.fields.items()
    if not name.startswith("GGUF.")
  }
  assert dict(file.fields) == theirs
  assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
  for tensor in reader.tensors:
    own = file.tensors[tensor.name]
    assert own.kind == tensor.tensor_type
    assert own.shape == tuple(tensor.shape[::-1])
    np.testing.assert_array_equal(
      own.data.ravel(), tensor.data.view(np.uint8).ravel()
    )


def test_what_a_file_does_not_say_follows_from_what_it_does(maker):
  made = maker()
  before = load_decoder(made.write())
  for name in (
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "vocab_size",
  ):
    made.fields[f"llama.{name}"] = None
  made.fields["tokenizer.ggml.token_type"] = None
  _assert_equal_models(load_decoder(made.write()), before)


def test_older_files_scale_positions_by_another_field(maker):
  made = maker("llama_linear")
  before = load_decoder(made.write())
  made.fields["llama.rope.scaling.type"] = None
  made.fields["llama.rope.scaling.factor"] = None
  made.fields["llama.rope.scale_linear"] = 4.0
  _assert_equal_models(load_decoder(made.write()), before)


def test_the_betas_and_the_warmth_of_yarn(maker):
  made = maker("llama_yarn", **YARN)
  made.fields |= {
    "llama.rope.scaling.yarn_beta_fast": 1.5,
    "llama.rope.scaling.yarn_beta_slow": 0.5,
    "llama.rope.scaling.attn_factor": 2.0,
  }
  scaling = dict(load_decoder(made.write())[0].rope.scaling)
  assert (scaling["beta_fast"], scaling["beta_slow"]) == (1.5, 0.5)
  assert scaling["attention_factor"] == 2 * (0.1 * math.log(4) + 1)


def test_a_directory_with_one_file_is_a_model(maker):
  made = maker()
  path = made.write()
  folder = path.parent / "folder"
  folder.mkdir()
  path.rename(folder / "one.gguf")
  lm = load(folder)
  assert lm.sampling == GREEDY
  assert {str(x.dtype) for x in jax.tree.leaves(lm.params)} == {"float32"}
  (folder / "two.gguf").write_bytes(b"GGUF")
  with pytest.raises(InputError, match="has 2 GGUF files; name the one to loa"):
    load(folder)


def test_a_loaded_file_is_saved_as_a_directory(maker, tmp_path):
  made = maker("llama32", "Q8_0", **LLAMA3)
  before = load(made.write())
  save(before, tmp_path / "saved")
  after = load(tmp_path / "saved", "float32")
  _assert_equal_models(
    (after.model, after.params), (before.model, before.params)
  )
  text = "abc<|turn|> ab<tool>c"
  assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
  assert after.tokenizer.eos_ids == before.tokenizer.eos_ids


GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "smollm2"
TEXTS = json.loads((GOLDEN / "texts.json").read_text())


@pytest.mark.parametrize(
  ("name", "split"),
  [
    *[("smollm", "smollm"), ("llama-bpe", "llama-bpe"), ("qwen2", "qwen2")],
    *[("llama3", "llama-bpe"), ("llama-v3", "llama-bpe")],
    ("deepseek-r1-qwen", "qwen2"),
  ],
)
def test_texts_are_split_as_transformers_splits_them(name, split):
  """By its converters; smollm as published (tests/golden/make_smollm2.py)."""
  small = TEXTS["small"]
  fields = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": name,
    "tokenizer.ggml.tokens": small["tokens"],
    "tokenizer.ggml.merges": small["merges"],
  }
  file = GgufFile(pathlib.Path("small.gguf"), fields, {})
  tokenizer = read_tokenizer(file)
  assert len({str(ids) for ids in small["ids"].values()}) == 3
  for sample, ids in zip(TEXTS["samples"], small["ids"][split], strict=True):
    assert tokenizer.encode(sample["text"]) == ids
    if split != "qwen2":  # which composes letters and their accents
      assert tokenizer.decode(ids) == sample["text"]


PUBLISHED = json.loads(
  (GOLDEN.parent / "published_tokenizers.json").read_text()
)


@pytest.mark.parametrize("split", PUBLISHED["tokenizers"])
def test_texts_have_the_ids_of_the_makers_own_tokenizer(split):
  """Of Llama 3 and Qwen3 (tests/golden/make_published_tokenizers.py)."""
  made = PUBLISHED["tokenizers"][split]
  fields = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": split,
    "tokenizer.ggml.tokens": made["tokens"],
    "tokenizer.ggml.token_type": made["kinds"],
    "tokenizer.ggml.merges": made["merges"],
  }
  tokenizer = read_tokenizer(GgufFile(pathlib.Path("part.gguf"), fields, {}))
  assert len(PUBLISHED["texts"]) > 30
  for text, ids, decoded in zip(
    PUBLISHED["texts"], made["ids"], made["decoded"], strict=True
  ):
    own = tokenizer.encode(text)
    assert [made["numbers"][number] for number in own] == ids
    assert tokenizer.decode(own) == decoded


def test_kinds_of_tokens_and_those_with_a_part_to_play(maker):
  made = maker()
  made.fields["tokenizer.chat_template"] = (
    "{{ bos_token }}{{ messages[0].content }}<|turn|>"
  )
  tokenizer = load(made.write()).tokenizer
  tokens = made.fields["tokenizer.ggml.tokens"]
  begin, end, turn, tool = (
    tokens.index(token) for token in ("<s>", "</s>", "<|turn|>", "<tool>")
  )
  assert (tokenizer.bos_id, tokenizer.pad_id) == (begin, None)
  assert tokenizer.eos_ids == (end, turn)
  ids = tokenizer.encode("<s>abc<tool>ab</s>")
  assert ids == [begin, tokens.index("abc"), tool, tokens.index("ab"), end]
  # What is special shows in no text; what a user has defined does.
  assert tokenizer.decode(ids) == "abc<tool>ab"
  assert tokenizer.split_chat("abc") == ("<s>abc", "<|turn|>")
  assert "[PAD]" in tokens
  assert tokenizer.vocab_size == len(tokens) - 1
  assert len(tokenizer.encode("[PAD]")) > 1


def test_a_control_token_that_ends_turns_ends_answers_without_a_field(maker):
  made = maker()
  tokens = made.fields["tokenizer.ggml.tokens"]
  kinds = made.fields["tokenizer.ggml.token_type"]
  del made.fields["tokenizer.ggml.eot_token_id"]
  end, turn = tokens.index("</s>"), tokens.index("<|turn|>")
  tokens[turn] = "<end_of_turn>"
  assert load(made.write()).tokenizer.eos_ids == (end, turn)
  # A word of a text with the same letters ends nothing.
  kinds[turn] = gguf.TokenType.NORMAL
  assert load(made.write()).tokenizer.eos_ids == (end,)


@pytest.mark.parametrize("count", [0, 1])
def test_merged_files_load(maker, count):
  made = maker()
  made.fields["split.count"] = count
  assert load(made.write()).tokenizer is not None


@pytest.mark.parametrize("number", [2**32 - 1, 10**6])
def test_ids_of_tokens_that_no_text_needs_may_not_exist(maker, number):
  made = maker()
  made.fields["tokenizer.ggml.padding_token_id"] = number
  made.fields["tokenizer.ggml.unknown_token_id"] = number
  assert load(made.write()).tokenizer.pad_id is None
  made.fields["tokenizer.ggml.bos_token_id"] = number
  with pytest.raises(InputError, match="which is the id of no token"):
    load(made.write())


def test_texts_begin_without_a_token_where_the_file_says_so(maker):
  made = maker()
  assert load(made.write()).tokenizer.bos == "<s>"
  made.fields["tokenizer.ggml.add_bos_token"] = False
  assert load(made.write()).tokenizer.bos == ""


def test_formats_that_can_be_dequantized():
  kinds = gguf.GGMLQuantizationType
  for kind in (kinds.F32, kinds.Q4_K, kinds.Q6_K, kinds.IQ4_XS, kinds.MXFP4):
    assert can_dequantize(kind)
  for kind in (kinds.I8, kinds.F64, kinds.Q8_1):
    assert not can_dequantize(kind)
