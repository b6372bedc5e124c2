"""E1.9 (a), (b): similarity and attention of tokens by their deviation."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.clustering import deviation, unit
from kvjax.experiments.papers.analyses.observed import activations
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run.progress_bar import track
from kvjax.methods.last_queries import window_mass

_BETAS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
_REACH = 5
# Number of last queries whose attention counts, and of ignored first tokens.
_QUERIES, _SINKS = 10, 5
_DECILES = 10


class _Head(NamedTuple):
  """Keys, deviations and masses of a KV head, without the last tokens."""

  units: Float[np.ndarray, "T D"]
  deviation: Float[np.ndarray, " T"]
  mass: Float[np.ndarray, " T"]


def measure(subject: Subject) -> Findings:
  """Measures gamma by beta over heads, and attention by decile per layer."""
  rows = [_heads(subject, row) for row in track(subject.rows)]
  layers = [
    list(itertools.chain(*of_rows)) for of_rows in zip(*rows, strict=True)
  ]
  title = subject.described
  return Findings(
    [_by_beta(layers, title), _by_decile(layers, title)],
    [
      "S_intra and S_inter are mean cosines among the tokens that deviate by "
      "more than beta, and of these with all others. The authors' own plot, "
      "by mean distances within groups of 50 tokens, is not drawn."
    ],
  )


def likeness(
  units: Float[np.ndarray, "T D"], chosen: Bool[np.ndarray, " T"]
) -> tuple[float, float]:
  """Computes mean cosines among the chosen keys, and with the other keys.

  The result is NaN if fewer than two keys are chosen, or all of them.
  """
  inside, outside = units[chosen].sum(axis=0), units[~chosen].sum(axis=0)
  count, other_count = int(chosen.sum()), int((~chosen).sum())
  if count < 2 or not other_count:
    return float("nan"), float("nan")
  # Exclude a key's cosine with itself, which is 1 unless the key is zero.
  itself = (units[chosen] ** 2).sum()
  among = (inside @ inside - itself) / (count * (count - 1))
  return float(among), float(inside @ outside / (count * other_count))


def by_decile(
  order: Float[np.ndarray, " T"], mass: Float[np.ndarray, " T"]
) -> Float[np.ndarray, " 10"]:
  """Computes the share of mass of each decile of tokens, the highest last."""
  tenths = np.array_split(mass[np.argsort(order, kind="stable")], _DECILES)
  return np.array([part.sum() for part in tenths]) / mass.sum()


def _heads(subject: Subject, row: Sequence[int]) -> list[list[_Head]]:
  layers = []
  for layer in activations(subject.lm, row):
    last = layer.keys.shape[2] - _QUERIES
    parts = [np.asarray(part, np.float64) for part in _statistics_of(layer)]
    heads = zip(*parts, strict=True)
    layers.append([_Head(*(part[:last] for part in head)) for head in heads])
  return layers


@jax.jit
def _statistics_of(
  layer: Activations,
) -> tuple[Float[Array, "K T D"], Float[Array, "K T"], Float[Array, "K T"]]:
  """Computes unit keys, deviations and masses of the first row's heads."""
  keys = layer.keys[0].astype("float32")
  length = keys.shape[1]
  prefix = jnp.arange(length) < length - _QUERIES
  deviations = [deviation(of_head, prefix, _REACH, True) for of_head in keys]
  mass = window_mass(LayerCache.of(layer), layer, _QUERIES)[0]
  return unit(keys), jnp.stack(deviations), jnp.sum(mass, axis=1)


def _by_beta(layers: list[list[_Head]], title: str) -> Table:
  heads = [head for layer in layers for head in layer]
  lines = []
  for beta in _BETAS:
    chosen = [head.deviation > beta for head in heads]
    pairs = [
      likeness(head.units, mask)
      for head, mask in zip(heads, chosen, strict=True)
    ]
    known = np.array([pair for pair in pairs if np.isfinite(pair).all()])
    among, between = known.mean(axis=0) if len(known) else (np.nan, np.nan)
    lines.append(
      [
        f"{beta:g}",
        f"{100 * np.mean([mask.mean() for mask in chosen]):.1f} %",
        f"{among:.3f}",
        f"{between:.3f}",
        f"{among / between:.2f}",
        f"{len(known)} of {len(heads)}",
      ]
    )
  header = ["beta", "tokens", "S_intra", "S_inter", "Gamma", "heads"]
  return Table(f"likeness of deviating tokens, {title}", header, lines)


def _by_decile(layers: list[list[_Head]], title: str) -> Table:
  lines = []
  for number, heads in enumerate(layers):
    shares = np.mean(
      [by_decile(h.deviation[_SINKS:], h.mass[_SINKS:]) for h in heads], axis=0
    )
    lines.append(
      [str(number), *(f"{100 * share:.1f}" for share in shares[::-1])]
    )
  names = ["top", *(f"{n}." for n in range(2, _DECILES + 1))]
  return Table(
    f"% of the attention by tenths of deviation, {title}",
    ["layer", *names],
    lines,
  )
