"""Products of one row, which GPUs compute as the first of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import kernels
from kvjax.experiments.timing.random_models import random_llama
from kvjax.models.one_row import Projection

SHAPES = [(1, 1, 8), (8,), (2, 1, 8), (1, 3, 8)]


def rows_of_products(run, *operands):
  """The rows that each product multiplies."""
  text = str(jax.make_jaxpr(run)(*operands))
  return [line for line in text.splitlines() if "dot_general" in line]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_projection_multiplies_two_rows_at_least(platform, shape):
  layer = Projection(8, 6, rngs=nnx.Rngs(0))
  x = jax.random.normal(jax.random.key(0), shape)
  with kernels.use("xla", platform):
    (product,) = rows_of_products(layer, x)
    found = layer(x)
  wanted = np.float64(x) @ np.float64(layer.kernel[...])
  np.testing.assert_allclose(found, wanted, atol=1e-6)
  alone = x.size == 8 and platform == "gpu"
  assert ("f32[2,6]" in product) == alone


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_one_row_are_those_of_many(tied):
  _, model, params = random_llama(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=12,
    max_position_embeddings=16,
    tie_word_embeddings=tied,
  )
  hidden = jax.random.normal(jax.random.key(1), (3, 8))
  wanted = model.logits(params, hidden)
  with kernels.use("xla", "gpu"):
    (product,) = rows_of_products(lambda x: model.logits(params, x), hidden[:1])
    found = model.logits(params, hidden[:1])
  assert "f32[2,12]" in product
  np.testing.assert_allclose(found, wanted[:1], atol=1e-6)
  assert found.dtype == jnp.float32
