"""Llama-3.1-8B without its weights, which take 16 GB."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import DecoderModel, from_decoder
from kvjax.models.sharding import param_shardings

NAME = "Llama-3.1-8B"
LAYERS = 32
VOCABULARY = 128_256
WIDTH = 4096

# https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
_FIELDS = {
  "model_type": "llama",
  "vocab_size": VOCABULARY,
  "hidden_size": WIDTH,
  "intermediate_size": 14336,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "max_position_embeddings": 131_072,
  "rms_norm_eps": 1e-5,
  "rope_theta": 500_000.0,
  "rope_scaling": {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  },
}


def shapes(mesh: Mesh, layers: int) -> tuple[DecoderModel, nnx.State]:
  """Returns the model's functions, and its bfloat16 weights as shapes.

  Args:
    mesh: a mesh with an axis "model".
    layers: number of layers.
  """
  config = DecoderConfig.from_hf(_FIELDS | {"num_hidden_layers": layers})
  model, params = from_decoder(
    nnx.eval_shape(
      lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
  )
  places = param_shardings(params, model.geometry, mesh)
  return model, jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    params,
    places,
  )
