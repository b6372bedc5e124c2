"""A model too small to know anything, in the bundled model's layout."""

import pytest
from flax import nnx

import models
from experiments.reference import vocabulary
from models.config import DecoderConfig
from models.decoder import Decoder
from models.language_model import from_decoder

POSITIONS = 512


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
  config = DecoderConfig.from_hf(
    {
      "model_type": "llama",
      "vocab_size": vocabulary.SIZE,
      "hidden_size": 32,
      "intermediate_size": 48,
      "num_hidden_layers": 2,
      "num_attention_heads": 4,
      "num_key_value_heads": 2,
      "head_dim": 8,
      "max_position_embeddings": POSITIONS,
      "tie_word_embeddings": True,
    }
  )
  model, params = from_decoder(Decoder(config, rngs=nnx.Rngs(0)))
  tokenizer = models.Tokenizer(vocabulary.build(), vocabulary.config(POSITIONS))
  directory = tmp_path_factory.mktemp("models") / "tiny"
  models.save(models.Pretrained(model, params, config, tokenizer), directory)
  return directory


@pytest.fixture(scope="session")
def tiny(tiny_directory):
  return models.load(tiny_directory, "float32")
