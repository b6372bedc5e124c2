"""Models with random weights, to be timed."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from kvjax.experiments.tpu.published import Published
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import DecoderModel, from_decoder
from kvjax.models.pretrained import Pretrained


def random_llama(**sizes: Any) -> tuple[DecoderConfig, DecoderModel, nnx.State]:
  """Creates a Llama in float32."""
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


def with_sizes(name: str, dtype: str) -> Pretrained:
  """Creates a model of the sizes of a published one, without a tokenizer.

  Args:
    name: name of a model whose sizes come with kvjax, or a config.json.
    dtype: dtype of the weights.

  Raises:
    InputError: there are no such sizes.
  """
  published = Published.find(name)
  config = published.config(published.layers)
  decoder = Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
  return Pretrained(*from_decoder(decoder), config, None)
