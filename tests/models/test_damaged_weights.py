"""Damaged model directories are refused in one sentence."""

import json
import shutil

import numpy as np
import pytest
from model_directories import copied_model, edit, edit_config

from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.models.pretrained import load, load_decoder
from kvjax.models.weights import write_weights

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def directory(tmp_path):
  return copied_model(tmp_path)


def _damage_no_directory(directory):
  shutil.rmtree(directory)


def _damage_no_config(directory):
  (directory / "config.json").unlink()


def _damage_config_not_json(directory):
  (directory / "config.json").write_text("{")


def _damage_config_not_an_object(directory):
  (directory / "config.json").write_text("[]")


def _damage_config_unreadable(directory):
  # A regular file whose first byte can be read by nobody.
  (directory / "config.json").unlink()
  (directory / "config.json").symlink_to("/proc/self/mem")


def _damage_config_encoding(directory):
  (directory / "config.json").write_bytes(b'{"model_type": "\xff"}')


def _damage_index(directory):
  (directory / WHOLE).unlink()
  (directory / INDEX).write_text(json.dumps({"weight_map": [WHOLE]}))


def _damage_index_entry(directory):
  (directory / WHOLE).unlink()
  (directory / INDEX).write_text(json.dumps({"weight_map": {NORM: [WHOLE]}}))


def _damage_architecture(directory):
  edit_config(directory, model_type="gpt2")


def _damage_no_weights(directory):
  (directory / WHOLE).unlink()


def _damage_pointer(directory):
  (directory / WHOLE).write_text("version https://git-lfs.github.com/spec/v1")


def _damage_truncated(directory):
  content = (directory / WHOLE).read_bytes()
  (directory / WHOLE).write_bytes(content[:-8])


def _damage_shard(directory):
  model, params = load_decoder(directory, "float32")
  (directory / WHOLE).unlink()
  write_weights(params, model.config, directory, 30_000)
  sorted(directory.glob("model-00002-of-*"))[0].unlink()


def _damage_missing(directory):
  edit(directory / WHOLE, lambda tensors: tensors.pop(NORM))


def _damage_unexpected(directory):
  def add(tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)

  edit(directory / WHOLE, add)


def _damage_shape(directory):
  edit_config(directory, intermediate_size=40)


def _damage_quantized(directory):
  def quantize(tensors):
    tensors[NORM] = tensors[NORM].astype(np.int8)

  edit(directory / WHOLE, quantize)


def _damage_config_is_a_directory(directory):
  (directory / "config.json").unlink()
  (directory / "config.json").mkdir()


def _damage_config_digits(directory):
  (directory / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}")


def _damage_huge_size(directory):
  edit_config(directory, intermediate_size=2**31 - 1)


def _damage_nan(directory):
  def spoil(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][2, 3] = np.nan

  edit(directory / WHOLE, spoil)


def _damage_infinite(directory):
  def spoil(tensors):
    tensors[NORM] = np.full_like(tensors[NORM], -np.inf)

  edit(directory / WHOLE, spoil)


def _damage_eos_beyond(directory):
  (directory / "generation_config.json").write_text('{"eos_token_id": [2, 80]}')


def _damage_eos_below(directory):
  (directory / "generation_config.json").unlink()
  edit_config(directory, eos_token_id=-1)


def _damage_tokenizer_is_a_directory(directory):
  (directory / "tokenizer.json").unlink()
  (directory / "tokenizer.json").mkdir()


def test_ids_beyond_the_embedding_are_refused_where_a_text_has_them(directory):
  path = directory / "tokenizer.json"
  stored = json.loads(path.read_text())
  stored["model"]["vocab"] |= {"x1": 80, "x2": 81}
  path.write_text(json.dumps(stored))
  text = load(directory).text
  assert text.encode("w1 w2") == [1, 2]
  with pytest.raises(InputError, match="'x2', whose id is 81, but the model"):
    text.encode("w1 x2")


@pytest.mark.parametrize(
  ("damage", "sentence"),
  [
    (_damage_no_directory, r"There is no model .*model.; give the path of a"),
    (_damage_no_config, r"model has no config\.json; a model directory"),
    (_damage_config_not_json, r"config\.json is not valid JSON"),
    (_damage_config_not_an_object, r"config\.json must hold a JSON object"),
    (_damage_config_unreadable, r"config\.json cannot be read: "),
    (_damage_config_encoding, r"config\.json is not text in UTF-8"),
    (_damage_index, r"index\.json must have a weight_map that gives each"),
    (_damage_index_entry, r"index\.json must have a weight_map that gives"),
    (_damage_architecture, r"'gpt2', which is not supported; supported are"),
    (_damage_no_weights, r"has no weights; it should hold model\.safetensors"),
    (_damage_pointer, r"not a complete safetensors file .*fetch it again"),
    (_damage_truncated, r"not a complete safetensors file .*fetch it again"),
    (_damage_shard, r"lacks the shard model-00002-of-\d{5}\.safetensors that"),
    (_damage_missing, r"lack the tensor model\.norm\.weight"),
    (_damage_unexpected, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias,"),
    (_damage_shape, r"shape \(32, 48\); config\.json asks for \(32, 40\)"),
    (_damage_quantized, r"stored as I8; only F32, F16, BF16 are read"),
    (_damage_config_is_a_directory, r"config\.json cannot be read: Is a dir"),
    (_damage_config_digits, r"config\.json is not valid JSON"),
    (_damage_huge_size, r"config\.json asks for \(32, 2147483647\)"),
    (_damage_nan, r"layers\.1\.mlp\.up_proj\.weight in .* holds NaN or inf"),
    (_damage_infinite, r"model\.norm\.weight in .* holds NaN or infinite"),
    (_damage_eos_beyond, r"ends with the id 80 .* embeds 80 tokens only"),
    (_damage_eos_below, r"ends with the id -1 .* embeds 80 tokens only"),
    (_damage_tokenizer_is_a_directory, r"tokenizer\.json cannot be read: Is"),
  ],
)
def test_a_damaged_directory_gets_one_sentence(directory, damage, sentence):
  load(directory, "float32")
  damage(directory)
  with pytest.raises(InputError, match=sentence) as caught:
    load(directory, "float32")
  assert "\n" not in str(caught.value)
  assert str(caught.value).endswith(".")


def test_what_is_not_finite_is_found_on_a_mesh(directory):
  _damage_nan(directory)
  with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight in"):
    load_decoder(directory, "float32", parse_mesh("data:2,model:2"))
