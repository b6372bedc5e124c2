"""E2.8: correlation of keys, their mean, and the attention they receive."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.clustering import unit
from kvjax.experiments.paper_experiments.analyses.observed import activations
from kvjax.experiments.paper_experiments.findings import Findings, Subject
from kvjax.experiments.reporting.formats import Table
from kvjax.kernels.attention_mass import causal_mass


class Statistics(NamedTuple):
  """Statistics of every query head of a layer.

  Attributes:
    correlation: correlation over keys of the cosine with the mean key and the
      mean attention from the queries after the key.
    apart: cosine of mean key and mean query.
    variation: standard deviation of the norms of keys, relative to their mean.
  """

  correlation: Float[Array, "B N"]
  apart: Float[Array, "B N"]
  variation: Float[Array, "B N"]


def measure(subject: Subject) -> Findings:
  """Measures a line per layer, with means over heads and prompts."""
  rows = []
  for row in subject.rows:
    layer_activations = activations(subject.lm.model, subject.lm.params, row)
    rows.append([statistics(layer) for layer in layer_activations])
  lines = []
  for layer in range(len(rows[0])):
    values = [
      np.stack(x) for x in zip(*(row[layer] for row in rows), strict=True)
    ]
    correlation, apart, variation = values
    lines.append(
      [
        str(layer),
        f"{correlation.mean():+.2f}",
        f"{100 * (correlation < 0).mean():.0f} %",
        f"{apart.mean():+.2f}",
        f"{100 * (apart < 0).mean():.0f} %",
        f"{variation.mean():.2f}",
      ]
    )
  header = [
    "layer",
    "corr(cos to mean key, attention)",
    "heads below 0",
    "cos(mean key, mean query)",
    "heads below 0",
    "norms: std / mean",
  ]
  return Findings([Table(subject.described, header, lines)])


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
  )
  seen_by = length - jnp.arange(length, dtype=jnp.int32)
  attention = mass / seen_by.astype(jnp.float32)[None, None]
  keys = jnp.repeat(layer_activations.keys.astype(jnp.float32), group, axis=1)
  mean_key = jnp.mean(keys, axis=2)
  mean_query = jnp.mean(layer_activations.queries.astype(jnp.float32), axis=2)
  alike = jnp.einsum("bntd,bnd->bnt", unit(keys), unit(mean_key))
  norms = jnp.linalg.norm(keys, axis=-1)
  return Statistics(
    _correlation(alike, attention),
    jnp.sum(unit(mean_key) * unit(mean_query), axis=-1),
    jnp.std(norms, axis=-1) / jnp.mean(norms, axis=-1),
  )


def _correlation(
  x: Float[Array, "*B T"], y: Float[Array, "*B T"]
) -> Float[Array, "*B"]:
  """Computes Pearson's correlation; 0 if either side is constant."""
  center = functools.partial(jnp.mean, axis=-1, keepdims=True)
  return jnp.sum(unit(x - center(x)) * unit(y - center(y)), axis=-1)
