"""The training's attention and its gradients against plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.activations import Activations
from kvjax.experiments.reference.attention import causal_attention


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
  return causal_attention(Activations(queries, keys, values, positions))


@pytest.mark.parametrize("length", [1, 100, 300])
def test_outputs_and_gradients_are_those_of_plain_attention(length):
  shapes = [(2, 6, length, 8), (2, 3, length, 8), (2, 3, length, 8)]
  rng = np.random.default_rng(0)
  args = [
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in (*shapes, shapes[0])
  ]

  @functools.partial(jax.jit, static_argnums=0)
  def both(attend, queries, keys, values, change):
    output, back = jax.vjp(attend, queries, keys, values)
    return output, back(change)

  got, back = both(ours, *args)
  expected, reference = both(plain, *args)
  np.testing.assert_allclose(got, expected, atol=2e-6)
  for mine, theirs in zip(back, reference, strict=True):
    np.testing.assert_allclose(mine, theirs, atol=2e-5)
