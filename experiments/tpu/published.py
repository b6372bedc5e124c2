"""Published models without their weights, which take up to 54 GB."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import DecoderModel, from_decoder
from kvjax.models.sharding import param_shardings


@dataclasses.dataclass(frozen=True, eq=False)
class Published:
  """A model.

  Attributes:
    name: its name.
    fields: fields of its config.json.
  """

  name: str
  fields: Mapping[str, Any]

  @property
  def layers(self) -> int:
    """Number of its layers."""
    layers: int = self.fields["num_hidden_layers"]
    return layers

  def shapes(self, mesh: Mesh, layers: int) -> tuple[DecoderModel, nnx.State]:
    """Returns the model's functions, and its bfloat16 weights as shapes.

    Args:
      mesh: a mesh with an axis "model".
      layers: number of layers, the first ones.
    """
    config = DecoderConfig.from_hf({**self.fields, "num_hidden_layers": layers})
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


# https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
LLAMA = Published(
  "Llama-3.1-8B",
  {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
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
  },
)
# https://huggingface.co/google/gemma-3-27b-it/blob/main/config.json
GEMMA = Published(
  "Gemma 3 27B",
  {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
  },
)
# https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json
GPT_OSS = Published(
  "gpt-oss-20b",
  {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "rope_scaling": {
      "rope_type": "yarn",
      "factor": 32.0,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "truncate": False,
      "original_max_position_embeddings": 4096,
    },
  },
)
