"""Methods score by the attention that the layer has: scale, softcap, sinks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scoring

from kvjax.kernels.attention import AttentionOptions
from kvjax.methods import RKV
from kvjax.methods.ranking import score_centers
from kvjax.registry.names import get_method
from kvjax.testing.checks import all_activations

LENGTHS = [37, 21]
SCALED = [
  "snapkv",
  "tova",
  "h2o",
  "dropkv",
  "rkv:importance=1",
  "finch",
  "noncausal:scale=rsqrt_d",
  "compactor:scale=rsqrt_d",
  "protokv.squeezed",
]


def prompt(**options):
  return dataclasses.replace(
    all_activations(3, LENGTHS, 40), attention=AttentionOptions(**options)
  )


@pytest.mark.parametrize("name", SCALED)
def test_the_scale_of_a_layer_is_that_of_its_queries(name):
  method = get_method(name)
  scaled, plain = prompt(scale=1.3), prompt()
  dim = plain.queries.shape[-1]
  longer = dataclasses.replace(plain, queries=plain.queries * 1.3 * dim**0.5)
  found, expected, other = (
    jax.tree.leaves(scoring.evaluate(method, each))
    for each in (scaled, longer, plain)
  )
  for one, same in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, same, rtol=2e-4, atol=1e-5)
  assert any(
    not np.allclose(one, unlike, rtol=1e-2)
    for one, unlike in zip(found, other, strict=True)
  )


def test_sinks_take_their_share_of_what_rkv_calls_important():
  method = RKV(window=1, kernel=1, importance=1.0)
  plain = prompt()
  heads, kv_heads = plain.queries.shape[1], plain.keys.shape[1]
  sinks = np.linspace(-1, 2, heads)
  found, without = (
    np.asarray(scoring.evaluate(method, each), np.float64)
    for each in (
      dataclasses.replace(plain, sinks=jnp.asarray(sinks, jnp.float32)),
      plain,
    )
  )
  largest = sinks.reshape(kv_heads, -1).max(axis=1)
  for row, length in enumerate(LENGTHS):
    queries = np.asarray(plain.queries[row, :, length - 1], np.float64)
    keys = np.asarray(plain.keys[row, :, : length - 1], np.float64)
    grouped = queries.reshape(kv_heads, -1, queries.shape[-1])
    logits = np.einsum("kgd,ktd->kgt", grouped, keys) / keys.shape[-1] ** 0.5
    total = np.exp(logits.max(axis=1)).sum(axis=-1)
    share = total / (total + np.exp(largest))
    np.testing.assert_allclose(
      found[row, :, :length],
      without[row, :, :length] * share[:, None],
      rtol=1e-4,
      atol=1e-7,
    )


@pytest.mark.parametrize("sunk", [False, True])
def test_mean_keys_are_attended_to_as_the_layer_attends(sunk):
  rng = np.random.default_rng(0)
  queries, keys = rng.normal(size=(5, 8)), rng.normal(size=(30, 8))
  cluster, prefix = rng.integers(0, 4, 30), np.arange(30) < 25
  sinks = rng.normal(size=5) if sunk else None
  means = [keys[prefix & (cluster == c)].mean(axis=0) for c in range(4)]
  sizes = [np.sum(prefix & (cluster == c)) for c in range(4)]
  logits = 2.0 * np.tanh(queries @ np.transpose(means) * 0.7 / 2.0)
  total = np.sum(np.exp(logits) * sizes, axis=1)
  if sunk:
    total += np.exp(sinks)
  found = score_centers(
    *(jnp.asarray(x, jnp.float32) for x in (queries, keys)),
    jnp.asarray(cluster, jnp.int32),
    jnp.asarray(prefix),
    5,  # one is empty
    AttentionOptions(scale=0.7, softcap=2.0),
    None if sinks is None else jnp.asarray(sinks, jnp.float32),
  )
  expected = np.sum(np.exp(logits) / total[:, None], axis=0)
  np.testing.assert_allclose(found, [*expected, 0], rtol=1e-5)
