"""Gradients of attention by parts of its keys, against those of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.kernels.attention import AttentionOptions, gradient, with_sinks
from kvjax.kernels.attention import partial_attention as attend

BATCH, HEADS, KV_HEADS, QUERIES, SLOTS, DIM, WIDTH = 2, 4, 2, 5, 11, 8, 6


def draw(number, *shape):
  return jax.random.normal(jax.random.key(number), shape)


@pytest.mark.parametrize(
  "options",
  [AttentionOptions(), AttentionOptions(window=6, scale=0.9, softcap=0.8)],
)
def test_parts_add_up_to_the_gradient(options, monkeypatch):
  monkeypatch.setattr(gradient, "_LOGITS", 3 * QUERIES)  # four tiles
  queries = draw(0, BATCH, HEADS, QUERIES, DIM)
  keys = draw(1, BATCH, KV_HEADS, SLOTS, DIM)
  values = draw(2, BATCH, KV_HEADS, SLOTS, WIDTH)
  sinks, wanted = draw(3, HEADS), draw(4, BATCH, HEADS, QUERIES, WIDTH)
  # Slots of the second row are empty, and its last query is padding.
  places = np.tile(np.arange(SLOTS), (BATCH, 1))
  places[1, 3:5] = -1
  asked = np.tile(np.arange(6, 6 + QUERIES), (BATCH, 1))
  asked[1, -1] = -1
  places, asked = jnp.asarray(places, jnp.int32), jnp.asarray(asked, jnp.int32)
  wanted = jnp.where((asked >= 0)[:, None, :, None], wanted, 0.0)
  cut = 7

  def whole(queries, keys, values):
    each = jnp.broadcast_to(places[:, None], (BATCH, KV_HEADS, SLOTS))
    return with_sinks(
      attend(queries, keys, values, asked, each, "reference", options), sinks
    )

  def dot(*inputs):
    return jnp.sum(whole(*inputs).output * wanted)

  expected = jax.grad(dot, (0, 1, 2))(queries, keys, values)
  result = whole(queries, keys, values)
  empty = (places < 0)[:, None, :, None]
  padding = (asked < 0)[:, None, :, None]
  parts = [
    gradient.attention_gradient(
      jnp.where(padding, jnp.nan, queries),
      jnp.where(empty, jnp.nan, keys)[:, :, part],
      jnp.where(empty, jnp.nan, values)[:, :, part],
      asked,
      places[:, part],
      result,
      wanted,
      options,
    )
    for part in (slice(cut), slice(cut, None))
  ]
  found = (
    parts[0].queries + parts[1].queries,
    jnp.concatenate([part.keys for part in parts], axis=2),
    jnp.concatenate([part.values for part in parts], axis=2),
  )
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
