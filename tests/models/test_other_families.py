"""Families of models that others load from a directory."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.models import other_families, save
from kvjax.models.catalog import BUNDLED
from kvjax.models.pretrained import load_decoder
from kvjax.testing import TinyModel

KIND = "tiny_of_others"
SIZE = 8192


def load_tiny(directory, dtype, mesh):
  assert (directory / "config.json").is_file()
  model = TinyModel(dtype=dtype, vocab_size=SIZE)
  params = model.init(json.loads((directory / "config.json").read_text())["n"])
  if mesh is not None:
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(params, whole)
  return model, params


@pytest.fixture
def families(monkeypatch):
  monkeypatch.setattr(other_families, "LOADS", {})
  return kvjax.models.register


@pytest.fixture
def directory(tmp_path):
  """A directory with the tokenizer of the reference model."""
  path = tmp_path / "model"
  path.mkdir()
  fields = {"model_type": KIND, "n": 3, "eos_token_id": 5, "any": "thing"}
  (path / "config.json").write_text(json.dumps(fields))
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(BUNDLED / name, path)
  return path


def test_a_directory_of_another_family_loads(families, directory):
  families(KIND, load_tiny)
  lm = kvjax.load(directory, dtype="float32")
  assert lm.model == TinyModel(vocab_size=SIZE)
  expected = TinyModel(vocab_size=SIZE).init(3)
  assert jax.tree.all(jax.tree.map(np.array_equal, lm.params, expected))
  assert lm.generation["eos_token_id"] == 5
  assert lm.text.eos_ids == (5,)
  assert kvjax.load(directory).model.dtype == "bfloat16"
  chat = lm.compress("The code of the door is 4817. Tea is at five.", "snapkv")
  assert isinstance(chat.ask("What is the code?", 4), str)
  assert len(chat.cache.layers) == 2


def test_it_is_given_the_mesh(families, directory):
  families(KIND, load_tiny)
  mesh = parse_mesh("data:1")
  lm = kvjax.load(directory, "float32", mesh)
  assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(lm.params))


def test_what_needs_a_decoder_of_ours_says_so(families, directory, tmp_path):
  families(KIND, load_tiny)
  lm = kvjax.load(directory)
  for refused in (
    lambda: lm.config,
    lambda: load_decoder(directory),
    lambda: save(lm, tmp_path / "saved"),
  ):
    with pytest.raises(kvjax.InputError, match="is a model of another package"):
      refused()
  assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
  ("name", "load", "said"),
  [
    ("llama", load_tiny, "'llama' are loaded by kvjax itself"),
    (KIND, lambda *a: None, "are loaded by another function already"),
    ("two words", load_tiny, "'two words' does not fit"),
  ],
)
def test_registrations_are_checked(families, name, load, said):
  families(KIND, load_tiny)
  families(KIND, load_tiny)  # Of a module that is imported again.
  with pytest.raises(kvjax.InputError, match=said):
    families(name, load)


@pytest.mark.parametrize(
  ("returned", "said"),
  [
    (TinyModel(), "returns a kvjax.Model and its weights; for .* a TinyModel"),
    ((TinyModel, {}), "The model is a kvjax.Model"),
    (({}, TinyModel()), "it returns a dict and a TinyModel"),
    ((), "it returns nothing"),
    ((TinyModel(), None), "a pytree of arrays; .* returns a NoneType without"),
    ((TinyModel(), {"embedding": "x"}), "returns a dict .*with other leaves"),
  ],
)
def test_what_is_loaded_is_checked(families, directory, returned, said):
  families(KIND, lambda *arguments: returned)
  with pytest.raises(kvjax.InputError, match=said):
    kvjax.load(directory)


def test_an_unknown_family_names_ours(families, directory):
  with pytest.raises(kvjax.InputError, match=f"model_type '{KIND}'.*llama"):
    kvjax.load(directory)


def test_an_end_of_answers_that_is_not_embedded_is_refused(families, directory):
  families(KIND, load_tiny)
  fields = {"model_type": KIND, "n": 3, "eos_token_id": SIZE}
  (directory / "config.json").write_text(json.dumps(fields))
  said = f"ends with the id {SIZE} .*embeds {SIZE} tokens only"
  with pytest.raises(kvjax.InputError, match=said):
    kvjax.load(directory)


def test_packages_register_families(families, directory, monkeypatch):
  monkeypatch.setattr(
    other_families, "load_plugins", lambda: families(KIND, load_tiny)
  )
  assert kvjax.load(directory, jnp.float32).model.dtype == "float32"
