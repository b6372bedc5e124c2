"""The training's attention and its gradients against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reference.attention import causal_attention
from kvjax.activations import Activations


def plain(queries, keys, values):
  group = queries.shape[1] // keys.shape[1]
  keys, values = (jnp.repeat(x, group, axis=1) for x in (keys, values))
  scores = jnp.einsum("bnsd,bntd->bnst", queries, keys)
  scores = scores * queries.shape[-1] ** -0.5
  seen = np.tril(np.ones(scores.shape[-2:], bool))
  weights = jax.nn.softmax(scores, where=seen[None, None])
  return jnp.einsum("bnst,bntd->bnsd", weights, values)


def ours(queries, keys, values):
  batch, _, length, _ = queries.shape
  positions = jnp.broadcast_to(
    jnp.arange(length, dtype=jnp.int32)[None], (batch, length)
  )
  seen = Activations(queries, keys, values, keys, positions)
  return causal_attention(0, None, seen)[0]


@pytest.mark.parametrize("length", [1, 100, 300])
def test_outputs_and_gradients_are_those_of_plain_attention(length):
  shapes = [(2, 6, length, 8), (2, 3, length, 8), (2, 3, length, 8)]
  keys = jax.random.split(jax.random.key(0), 4)
  args = [
    jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=False)
  ]
  change = jax.random.normal(keys[3], shapes[0])
  got, back = jax.vjp(ours, *args)
  expected, reference = jax.vjp(plain, *args)
  np.testing.assert_allclose(got, expected, atol=2e-6)
  for mine, theirs in zip(back(change), reference(change), strict=True):
    np.testing.assert_allclose(mine, theirs, atol=2e-5)
