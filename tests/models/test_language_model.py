"""The decoder as a value: equal, hashed once, pickled, with a vocabulary."""

import dataclasses
import pathlib
import pickle

import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.models.pretrained import load_decoder

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"


@pytest.fixture(scope="module")
def decoder():
  return load_decoder(GOLDEN / "llama31", "float32")


def test_equal_models_are_one_key(decoder):
  model, _ = decoder
  other, _ = load_decoder(GOLDEN / "llama31", "float32")
  assert {model: "found"}[other] == "found"
  assert dataclasses.replace(model) == model
  assert hash(dataclasses.replace(model)) == hash(model)


def test_a_pickled_model_is_hashed_anew(decoder):
  """Texts have other hashes in other processes."""
  model, _ = decoder
  assert hash(model) == vars(model)["_hash"]
  copy = pickle.loads(pickle.dumps(model))
  assert "_hash" not in vars(copy)
  assert copy == model
  assert hash(copy) == hash(model)


def test_it_refuses_tokens_that_it_does_not_embed(decoder):
  model, params = decoder
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(4))
  last = model.config.vocab_size - 1
  kvjax.prefill(model, params, kvjax.Prompts.of([[1, last]]), plan)
  with pytest.raises(InputError, match=f"There is no token {last + 1}: this"):
    kvjax.prefill(model, params, kvjax.Prompts.of([[1, last + 1]]), plan)
