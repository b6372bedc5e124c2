"""Llamas with random weights, to be timed."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import DecoderModel, from_decoder


def random_llama(
  **sizes: Any,
) -> tuple[DecoderConfig, DecoderModel, nnx.State]:
  """Creates a Llama in float32.

  Args:
    **sizes: fields of its config.json.
  """
  config = DecoderConfig.from_hf(
    dict(
      model_type="llama",
      rms_norm_eps=1e-5,
      tie_word_embeddings=True,
      hidden_act="silu",
      attention_bias=False,
      bos_token_id=1,
      eos_token_id=2,
    )
    | sizes
  )
  decoder = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
  return config, *from_decoder(decoder)
