"""Weights and model directories: read, written, refused."""

import collections
import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec
from model_directories import copied_model, edit, word_tokenizer

from kvjax.cache.sharding import parse_mesh
from kvjax.engine.sampling import GREEDY, Sampling
from kvjax.errors import InputError, InputWarning
from kvjax.models import tensor_files, weights
from kvjax.models.language_model import from_decoder
from kvjax.models.lora import add_adapters
from kvjax.models.pretrained import load, load_decoder
from kvjax.models.saving import save
from kvjax.models.weights import write_weights

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.npz"))


@pytest.fixture
def directory(tmp_path):
  return copied_model(tmp_path)


def test_a_path_may_begin_with_the_home_directory(directory, monkeypatch):
  monkeypatch.setenv("HOME", str(directory.parent))
  assert load(f"~/{directory.name}").config == load(directory).config


def _assert_equal_trees(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


def _stored_tensors(directory):
  tensors = {}
  for path in directory.glob("*.safetensors"):
    tensors |= safetensors.numpy.load_file(path)
  return tensors


@pytest.mark.parametrize("shard", [5_000_000, 20_000])
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gpt_oss_mxfp4"}))
def test_written_tensors_equal_those_read(family, shard, tmp_path):
  model, params = load_decoder(GOLDEN / family, "float32")
  write_weights(params, model.config, tmp_path, shard)
  assert (tmp_path / INDEX).is_file() == (shard == 20_000)
  before, after = _stored_tensors(GOLDEN / family), _stored_tensors(tmp_path)
  assert before.keys() == after.keys()
  for name, value in before.items():
    np.testing.assert_array_equal(value, after[name])


def test_shards_keep_to_their_size_and_the_index_names_all(tmp_path):
  model, params = load_decoder(GOLDEN / "mistral", "float32")
  write_weights(params, model.config, tmp_path, 20_000)
  index = json.loads((tmp_path / INDEX).read_text())
  files = {path.name for path in tmp_path.glob("*.safetensors")}
  assert set(index["weight_map"].values()) == files
  assert f"model-00001-of-{len(files):05d}.safetensors" in files
  total = 0
  for name in files:
    tensors = safetensors.numpy.load_file(tmp_path / name)
    size = sum(value.nbytes for value in tensors.values())
    assert size <= 20_000
    assert all(index["weight_map"][t] == name for t in tensors)
    total += size
  assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_loads_equal_bit_for_bit(directory, dtype, tmp_path):
  before = load(directory, dtype)
  save(before, tmp_path / "new" / "copy", max_shard_bytes=20_000)
  after = load(tmp_path / "new" / "copy", dtype)
  _assert_equal_trees(before.params, after.params)
  assert {str(x.dtype) for x in jax.tree.leaves(after.params)} == {dtype}
  assert after.model == before.model
  assert hash(after.model) == hash(before.model)
  assert after.config == before.config
  assert after.sampling == before.sampling
  assert after.tokenizer.eos_ids == before.tokenizer.eos_ids == (2,)
  assert after.tokenizer.encode("w7 </s>") == [7, 78]
  config = json.loads((tmp_path / "new" / "copy" / "config.json").read_text())
  assert config["torch_dtype"] == dtype
  assert config["bos_token_id"] == 77


def test_saving_replaces_the_old_model_and_keeps_other_files(directory):
  (directory / "README.md").write_text("card")
  (directory / "chat_template.jinja").write_text("old")
  model = load(directory, "float32")
  plain = dataclasses.replace(model, tokenizer=word_tokenizer())
  save(plain, directory, max_shard_bytes=20_000)
  assert not (directory / WHOLE).exists()
  save(plain, directory)
  modes = {path.stat().st_mode for path in directory.iterdir()}
  assert len(modes) == 1  # readable for whom the folder's other files are
  assert sorted(path.name for path in directory.iterdir()) == [
    "README.md",
    "config.json",
    "generation_config.json",
    WHOLE,
    "tokenizer.json",
    "tokenizer_config.json",
  ]
  assert list(directory.parent.iterdir()) == [directory]
  _assert_equal_trees(load(directory, "float32").params, model.params)


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_precision_files_load_as_asked(directory, source, dtype):
  def narrow(tensors):
    tensors |= {name: x.astype(source) for name, x in tensors.items()}

  edit(directory / WHOLE, narrow)
  scale = load_decoder(directory, dtype)[1]["norm"]["scale"][...]
  stored = safetensors.numpy.load_file(directory / WHOLE)[NORM]
  assert stored.dtype == source
  assert scale.dtype == dtype
  np.testing.assert_array_equal(scale, stored.astype(dtype))


def test_transposed_matrices_are_read_a_few_rows_at_a_time(
  directory, monkeypatch
):
  _, whole = load_decoder(directory, "float32")
  monkeypatch.setattr(weights, "_ROWS", 7)  # no divisor of any size
  _, found = load_decoder(directory, "float32")
  _assert_equal_trees(found, whole)


def test_each_device_reads_its_part_of_a_sharded_parameter():
  mesh = parse_mesh("data:2,model:2")
  model, alone = load_decoder(GOLDEN / "qwen25", "float32")
  other, split = load_decoder(GOLDEN / "qwen25", "float32", mesh)
  assert model == other
  _assert_equal_trees(alone, split)
  kernel = split["layers"][0]["self_attn"]["q_proj"]["kernel"][...]
  assert kernel.sharding.spec == PartitionSpec(None, None, "model")
  assert {shard.data.shape for shard in kernel.addressable_shards} == {
    (model.geometry.num_layers, 32, 16)
  }
  scale = split["norm"]["scale"][...]
  assert scale.sharding.is_fully_replicated
  assert len(scale.sharding.device_set) == 4


def test_devices_that_hold_the_same_part_share_what_is_read(monkeypatch):
  read = collections.Counter()

  class Counting:
    def __init__(self, file):
      self.file = file

    def get_slice(self, name):
      read[name] += 1
      return self.file.get_slice(name)

  def opened(directory):
    return {
      name: Counting(file) for name, file in open_files(directory).items()
    }

  open_files = tensor_files._open
  monkeypatch.setattr(tensor_files, "_open", opened)
  load_decoder(GOLDEN / "qwen25", "float32", parse_mesh("data:2,model:2"))
  # Once to check it, then once for each part.
  assert read["model.layers.1.self_attn.q_proj.weight"] == 1 + 2
  assert read["model.layers.1.input_layernorm.weight"] == 1 + 1


def test_leftovers_of_other_programs_are_passed_over(directory):
  before = load_decoder(directory, "float32")[1]

  def add(tensors):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.ones(8, np.float32)

  edit(directory / WHOLE, add)
  _assert_equal_trees(load_decoder(directory, "float32")[1], before)


def test_a_tied_output_matrix_may_be_stored_only_if_it_is_equal(tmp_path):
  target = tmp_path / "model"
  shutil.copytree(GOLDEN / "llama32", target)

  def repeat(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

  def change(tensors):
    tensors["lm_head.weight"][3, 4] += 1

  edit(target / WHOLE, repeat)
  load_decoder(target, "float32")
  edit(target / WHOLE, change)
  said = r"lm_head\.weight that differs from the embedding, and .* ties them"
  with pytest.raises(InputError, match=said):
    load_decoder(target, "float32")


def test_generation_defaults(directory):
  assert load(directory).sampling == GREEDY
  fields = dict(eos_token_id=[5, 6], temperature=0.6, do_sample=True, top_k=20)
  path = directory / "generation_config.json"
  path.write_text(json.dumps(fields | {"top_p": None, "max_length": 9}))
  model = load(directory)
  assert model.sampling == Sampling(temperature=0.6, top_p=1.0, top_k=20)
  assert model.tokenizer.eos_ids == (5, 6)
  save(model, directory)
  saved = json.loads(path.read_text())
  assert saved.items() >= (fields | {"max_length": 9}).items()
  penalties = {"repetition_penalty": 1.3, "min_p": 0.2, "typical_p": 1.0}
  path.write_text(json.dumps(fields | penalties))
  lm = load(directory)
  with pytest.warns(InputWarning, match="has repetition_penalty, min_p, which"):
    assert lm.sampling == Sampling(temperature=0.6, top_k=20)
  path.write_text(json.dumps(penalties))
  lm = load(directory)
  with pytest.warns(InputWarning, match="has repetition_penalty, which kvjax"):
    assert lm.sampling == GREEDY
  path.write_text(json.dumps(fields | {"temperature": 0}))
  assert load(directory).sampling == GREEDY
  path.write_text(json.dumps(fields | {"temperature": -1}))
  lm = load(directory)
  with pytest.raises(InputError, match=r"config\.json: temperature must be"):
    _ = lm.sampling
  path.write_text(json.dumps(fields | {"do_sample": False}))
  assert load(directory).sampling == GREEDY


def test_ids_that_are_not_embedded_may_be_there_but_not_in_a_prompt(directory):
  word_tokenizer(83).save(directory)
  lm = load(directory, "float32")
  assert lm.tokenizer.encode("w7 w79") == [7, 79]
  with pytest.raises(InputError) as caught:
    lm.tokenizer.encode("w7 <s> w8")
  assert str(caught.value) == (
    "The text holds '<s>', whose id is 80, but the model embeds 80 tokens "
    "only; leave it out."
  )


def test_a_model_needs_no_tokenizer(directory, tmp_path):
  whole = load(directory, "float32")
  for path in directory.glob("tokenizer*"):
    path.unlink()
  fields = {"temperature": 0.5, "eos_token_id": [5]}
  (directory / "generation_config.json").write_text(json.dumps(fields))
  lm = load(directory, "float32")
  assert lm.tokenizer is None
  with pytest.raises(InputError, match=r"no tokenizer, which texts need; put"):
    _ = lm.text
  save(lm, tmp_path / "saved")
  again = load(tmp_path / "saved", "float32")
  assert again.tokenizer is None
  assert fields.items() <= lm.generation.items()
  assert again.generation == lm.generation
  _assert_equal_trees(again.params, whole.params)


def test_only_the_two_dtypes_are_offered():
  with pytest.raises(InputError, match="'float16' is not one of bfloat16, fl"):
    load_decoder(GOLDEN / "llama3", "float16")
  with pytest.raises(InputError, match="'half a float' is not one of"):
    load_decoder(GOLDEN / "llama3", "half a float")


@pytest.mark.parametrize("dtype", [jnp.float32, np.dtype("f4")])
def test_dtypes_may_be_those_of_arrays(dtype):
  model, params = load_decoder(GOLDEN / "llama3", dtype)
  assert model == load_decoder(GOLDEN / "llama3", "float32")[0]
  assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_adapters_are_to_be_merged_first(tmp_path, format):
  lm = load(GOLDEN / "llama3", "float32")
  save(lm, tmp_path / "saved")
  model, params = add_adapters(lm.model, lm.params, 2, ["q"])
  adapted = dataclasses.replace(lm, model=model, params=params)
  with pytest.raises(InputError, match="merge them first"):
    save(adapted, tmp_path / "saved", format=format)
  assert load(tmp_path / "saved", "float32").model == lm.model


def test_transposed_kernels_are_written_as_they_are_meant(tmp_path):
  """The pitfall: safetensors writes a transposed view's buffer untransposed."""
  model, params = load_decoder(GOLDEN / "llama3", "float32")
  kernel = params["layers"][0]["mlp"]["up_proj"]["kernel"]
  numbers = jnp.arange(32 * 48, dtype=jnp.float32).reshape(32, 48)
  kernel[...] = kernel[...].at[1].set(numbers)
  write_weights(params, model.config, tmp_path)
  stored = safetensors.numpy.load_file(tmp_path / WHOLE)
  np.testing.assert_array_equal(
    stored["model.layers.1.mlp.up_proj.weight"],
    np.arange(32 * 48, dtype=np.float32).reshape(32, 48).T,
  )


@pytest.mark.parametrize(
  ("fields", "sentence"),
  [
    ({"num_layers": 3}, "The config has 3 layers, but the weights are of 2."),
    (
      {"num_kv_heads": 4},
      "The config asks for a k_proj of width 32 in layer 0, but the weights "
      "have 16.",
    ),
  ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(fields, sentence):
  model, params = load_decoder(GOLDEN / "llama3", "float32")
  decoder = nnx.merge(model.graphdef, params)
  decoder.config = dataclasses.replace(decoder.config, **fields)
  with pytest.raises(InputError) as raised:
    from_decoder(decoder)
  assert str(raised.value) == sentence
