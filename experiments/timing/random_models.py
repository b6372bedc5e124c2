"""Models with random weights and prompts of random tokens, to be timed."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.compilation.published import Published
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import DecoderModel, from_decoder
from kvjax.models.pretrained import Pretrained


def random_llama(
  dtype: str = "float32", **sizes: Any
) -> tuple[DecoderConfig, DecoderModel, nnx.State]:
  """Creates a Llama."""
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
  decoder = Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
  return config, *from_decoder(decoder)


def with_sizes(name: str, dtype: str, layers: int | None = None) -> Pretrained:
  """Creates a model of the sizes of a published one, without a tokenizer.

  Args:
    name: name of a model whose sizes come with kvjax, or a config.json.
    dtype: dtype of the weights.
    layers: number of layers, the first ones; all by default.

  Raises:
    InputError: there are no such sizes, or not so many layers.
  """
  published = Published.find(name)
  if layers is not None and layers > published.layers:
    raise InputError(
      f"--layers={layers} is more than the {published.layers} layers of "
      f"{published.name}."
    )
  config = published.config(layers or published.layers)
  decoder = Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
  return Pretrained(*from_decoder(decoder))


def prompts(ids: int, rows: int, length: int, seed: int = 0) -> kvjax.Prompts:
  """Draws prompts of token ids below `ids`."""
  drawn = np.random.default_rng(seed).integers(ids, size=(rows, length))
  return kvjax.Prompts.of(drawn.tolist())
