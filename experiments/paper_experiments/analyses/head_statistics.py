"""E2.8: how keys, their mean and the attention they get hang together."""

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
  """Of every query head of a layer.

  Attributes:
    correlation: over keys, of the cosine with the mean key and the mean
      attention received from the queries that see the key.
    apart: cosine of mean key and mean query.
    variation: standard deviation of the norms of keys over their mean.
  """

  correlation: Float[Array, "B N"]
  apart: Float[Array, "B N"]
  variation: Float[Array, "B N"]


def measure(subject: Subject) -> Findings:
  """A line per layer, means over heads and prompts."""
  found = []
  for row in subject.rows:
    seen = activations(subject.lm.model, subject.lm.params, row)
    found.append([statistics(layer) for layer in seen])
  lines = []
  for layer in range(len(found[0])):
    own = [
      np.stack(x) for x in zip(*(row[layer] for row in found), strict=True)
    ]
    correlation, apart, variation = own
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
def statistics(seen: Activations) -> Statistics:
  """See `Statistics`; in float32."""
  cache = LayerCache.of(seen)
  group = seen.queries.shape[1] // seen.keys.shape[1]
  length = seen.keys.shape[2]
  mass = causal_mass(seen.queries, seen.keys, seen.positions, cache.positions)
  seen_by = length - jnp.arange(length, dtype=jnp.int32)
  attention = mass / seen_by.astype(jnp.float32)[None, None]
  keys = jnp.repeat(seen.keys.astype(jnp.float32), group, axis=1)
  mean_key = jnp.mean(keys, axis=2)
  mean_query = jnp.mean(seen.queries.astype(jnp.float32), axis=2)
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
  """Pearson's; 0 where either does not vary."""
  center = functools.partial(jnp.mean, axis=-1, keepdims=True)
  return jnp.sum(unit(x - center(x)) * unit(y - center(y)), axis=-1)
