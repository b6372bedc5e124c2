"""E2.8: geometry of keys and queries, and the attention that keys receive."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import rankdata
from jaxtyping import Array, Float

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.clustering import unit
from kvjax.experiments.papers.analyses.drawing import HeadMap, head_maps
from kvjax.experiments.papers.analyses.observed import activations
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run.progress_bar import track
from kvjax.kernels.attention_mass import causal_mass


class Statistics(NamedTuple):
  """Statistics of every head of a layer.

  Attributes:
    correlation: correlation over keys of the cosine with the mean key and the
      mean attention from the queries after the key.
    rank_correlation: Spearman's correlation of this attention and the negative
      mean cosine with all keys, which is KeyDiff's score.
    apart: cosine of mean key and mean query.
    top: cosine of the key with KeyDiff's highest score and the mean query.
    queries_alike: mean cosine of queries and their mean.
    query_norm: mean norm of queries.
    keys_alike: mean cosine of keys and their mean.
    key_norm: mean norm of keys.
    variation: standard deviation of the norms of keys, relative to their mean.
  """

  correlation: Float[Array, "B N"]
  rank_correlation: Float[Array, "B N"]
  apart: Float[Array, "B N"]
  top: Float[Array, "B N"]
  queries_alike: Float[Array, "B N"]
  query_norm: Float[Array, "B N"]
  keys_alike: Float[Array, "B K"]
  key_norm: Float[Array, "B K"]
  variation: Float[Array, "B K"]


def measure(subject: Subject) -> Findings:
  """Measures a line per layer, and draws maps of means over prompts."""
  prompts = []
  for row in track(subject.rows):
    layer_activations = activations(subject.lm, row)
    prompts.append([statistics(layer) for layer in layer_activations])
  layers = [
    Statistics(*(jnp.concatenate(x) for x in zip(*of_layer, strict=True)))
    for of_layer in zip(*prompts, strict=True)
  ]
  return Findings(
    [_table(layers, subject.described)],
    [
      "Rank correlations are Spearman's. A key's attention is the mean over "
      "the queries from it on, and its cosine the mean of those with all keys; "
      "inferred: the paper says neither which queries count, nor how heads are "
      "averaged."
    ],
    {
      "alike.png": head_maps(
        [
          _map("cos(key, mean key)", [x.keys_alike for x in layers]),
          _map("cos(query, mean query)", [x.queries_alike for x in layers]),
        ]
      ),
      "apart.png": head_maps(
        [_map("cos(mean key, mean query)", [x.apart for x in layers])]
      ),
      "norms.png": head_maps(
        [
          _map("norm of keys", [x.key_norm for x in layers], False),
          _map("norm of queries", [x.query_norm for x in layers], False),
        ]
      ),
      "top.png": head_maps(
        [_map("cos(KeyDiff's top key, mean query)", [x.top for x in layers])]
      ),
    },
  )


@jax.jit
def statistics(layer_activations: Activations) -> Statistics:
  """Computes the statistics of a layer in float32."""
  cache = LayerCache.of(layer_activations)
  group = layer_activations.queries.shape[1] // layer_activations.keys.shape[1]
  length = layer_activations.keys.shape[2]
  mass = causal_mass(
    layer_activations.queries,
    layer_activations.keys,
    layer_activations.positions,
    cache.positions,
    options=layer_activations.attention,
    sinks=layer_activations.sinks,
  )
  seen_by = length - jnp.arange(length, dtype=jnp.int32)
  attention = mass / seen_by.astype(jnp.float32)[None, None]
  keys = layer_activations.keys.astype(jnp.float32)
  queries = layer_activations.queries.astype(jnp.float32)
  mean_query = jnp.mean(queries, axis=2)
  mean_key = jnp.mean(keys, axis=2)
  alike = _cosines(keys, mean_key)
  # The sum of the cosines with all keys, but for the number of keys.
  distinct = -_products(unit(keys), jnp.mean(unit(keys), axis=2))
  best = jnp.argmax(distinct, axis=-1)
  top_key = jnp.take_along_axis(keys, best[..., None, None], axis=2)[:, :, 0]
  repeat = functools.partial(jnp.repeat, repeats=group, axis=1)
  ranks = functools.partial(rankdata, method="ordinal", axis=-1)
  norms = jnp.linalg.norm(keys, axis=-1)
  return Statistics(
    _correlation(repeat(alike), attention),
    _correlation(ranks(repeat(distinct)), ranks(attention)),
    jnp.sum(unit(repeat(mean_key)) * unit(mean_query), axis=-1),
    jnp.sum(unit(repeat(top_key)) * unit(mean_query), axis=-1),
    jnp.mean(_cosines(queries, mean_query), axis=-1),
    jnp.mean(jnp.linalg.norm(queries, axis=-1), axis=-1),
    jnp.mean(alike, axis=-1),
    jnp.mean(norms, axis=-1),
    jnp.std(norms, axis=-1) / jnp.mean(norms, axis=-1),
  )


def _table(layers: Sequence[Statistics], title: str) -> Table:
  lines = [
    [
      str(number),
      f"{layer.correlation.mean():+.2f}",
      f"{100 * (layer.correlation < 0).mean():.0f} %",
      f"{layer.rank_correlation.mean():+.2f}",
      f"{layer.apart.mean():+.2f}",
      f"{100 * (layer.apart < 0).mean():.0f} %",
      f"{layer.top.mean():+.2f}",
      f"{layer.variation.mean():.2f}",
    ]
    for number, layer in enumerate(layers)
  ]
  header = [
    *("layer", "corr(cos to mean key, attention)", "heads below 0"),
    *("rank corr(-cos, attention)", "cos(mean key, mean query)"),
    *("heads below 0", "cos(top key, mean query)", "norms: std / mean"),
  ]
  return Table(title, header, lines)


def _map(
  title: str, layers: Sequence[Float[Array, "B H"]], cosine: bool = True
) -> HeadMap:
  """Builds a map of the means over prompts."""
  means = [np.asarray(layer).mean(axis=0) for layer in layers]
  return HeadMap(title, means, cosine)


def _products(
  x: Float[Array, "B H T D"], y: Float[Array, "B H D"]
) -> Float[Array, "B H T"]:
  return jnp.einsum("bhtd,bhd->bht", x, y)


def _cosines(
  x: Float[Array, "B H T D"], y: Float[Array, "B H D"]
) -> Float[Array, "B H T"]:
  return _products(unit(x), unit(y))


def _correlation(
  x: Float[Array, "*B T"], y: Float[Array, "*B T"]
) -> Float[Array, "*B"]:
  """Computes Pearson's correlation; 0 if either side is constant."""
  center = functools.partial(jnp.mean, axis=-1, keepdims=True)
  return jnp.sum(unit(x - center(x)) * unit(y - center(y)), axis=-1)
