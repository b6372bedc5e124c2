"""E4.11: how much of CTkvr's lists is distinct, and what they recall."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from kvjax.activations import Activations
from kvjax.experiments.papers.analyses.neighbors import (
  MAX_CENTROIDS,
  TOKENS_PER_CENTROID,
  highest,
)
from kvjax.experiments.papers.analyses.observed import (
  activations,
  softmax,
  unit,
)
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report import figures
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run.progress_bar import track

# Lists that a query recalls; the paper's number is 4.
_PROBES = (1, 2, 4, 8, 16)
# Keys that are read, for prompts of the paper's length and a sixteenth of it.
_READ = {"paper": 512, "small": 32}
_LIST_RATIO = 2.5
# Sinks and last tokens are always read, and not listed; the last queries of
# the prompt stand for decoded tokens.
_SINKS, _LOCAL, _QUERIES = 4, 64, 64


class Recalled(NamedTuple):
  """Means over queries and KV heads.

  Attributes:
    alpha: distinct keys of the recalled lists over the length of all of them.
    keys: number of distinct keys.
    found: share of the keys that attention ranks first that are among them.
  """

  alpha: float
  keys: float
  found: float


def measure(subject: Subject) -> Findings:
  """Measures a line per number of lists, and the spread over layers."""
  read = _READ[subject.scale]
  layers: list[list[Mapping[int, Recalled]]] = []
  for row in track(subject.rows):
    layers.append([recall(x, read) for x in activations(subject.lm, row)])
  by_probes = {
    probes: np.array([[of_layer[probes] for of_layer in row] for row in layers])
    for probes in _PROBES
  }
  lines = []
  for probes, values in by_probes.items():
    alpha, keys, found = values.mean(axis=(0, 1))
    lines.append(
      [
        str(probes),
        f"{alpha:.2f}",
        f"{keys:.0f}",
        f"{100 * found:.1f}",
        f"{(keys + 2 * read) / (2 * keys):.2f}",
      ]
    )
  header = ["C'", "alpha", "L recalled", "% found", "cost with reranking"]
  title = (
    f"{subject.described}, rho' = {read}, rho = {_LIST_RATIO:g} rho', one "
    f"centroid for {TOKENS_PER_CENTROID} tokens"
  )
  return Findings(
    [Table(title, header, lines)],
    [
      "Found are the rho' keys of the highest attention weights that a query's "
      "lists hold. The cost is (L + 2 rho') / 2 L of attending to all that is "
      f"recalled. The last {_QUERIES} queries of a prompt stand for decoded "
      "tokens, and those before them are the centroids. The shade is the range "
      "of layers. Which of the paper's pictures shows this is not known here."
    ],
    {"recalled.png": _draw(by_probes)},
  )


def recall(layer: Activations, read: int) -> dict[int, Recalled]:
  """Measures the first row of a layer, by number of recalled lists.

  Args:
    layer: its activations.
    read: rho', keys that each KV head reads per token.
  """
  group = layer.queries.shape[1] // layer.keys.shape[1]
  length = layer.keys.shape[2]
  queries = np.asarray(layer.queries[0], np.float32)
  queries = queries.reshape(-1, group, *queries.shape[1:])
  keys = np.asarray(layer.keys[0], np.float32)
  last = length - min(_QUERIES, length // 4)
  count = min(max(length // TOKENS_PER_CENTROID, 1), MAX_CENTROIDS, last)
  end = max(last - _LOCAL, _SINKS + 1)
  by_probes: dict[int, list[Recalled]] = {probes: [] for probes in _PROBES}
  for own, own_keys in zip(queries, keys, strict=True):
    centroids = own[:, last - count : last]
    weights = _most_weight(centroids, own_keys, _SINKS, end)
    listed = highest(weights, round(_LIST_RATIO * read))
    decoded = own[:, last:]
    wanted = highest(_most_weight(decoded, own_keys, _SINKS, end), read)
    order = np.argsort(-_most_alike(decoded, centroids), axis=1, kind="stable")
    for probes in _PROBES:
      chosen = listed[order[:, :probes]]
      distinct = chosen.any(axis=1)
      total = chosen.sum(axis=(1, 2))
      found = (distinct & wanted).sum(axis=1) / wanted.sum(axis=1)
      by_probes[probes].append(
        Recalled(
          float((distinct.sum(axis=1) / total).mean()),
          float(distinct.sum(axis=1).mean()),
          float(found.mean()),
        )
      )
  return {
    probes: Recalled(*np.mean(values, axis=0).tolist())
    for probes, values in by_probes.items()
  }


def _most_weight(
  queries: Float[np.ndarray, "G Q D"],
  keys: Float[np.ndarray, "T D"],
  start: int,
  end: int,
) -> Float[np.ndarray, "Q F"]:
  """Computes weights over all keys, the highest of a group's heads."""
  logits = queries @ keys.T / np.float32(np.sqrt(keys.shape[1]))
  return softmax(logits).max(axis=0)[:, start:end]


def _most_alike(
  queries: Float[np.ndarray, "G Q D"], centroids: Float[np.ndarray, "G C D"]
) -> Float[np.ndarray, "Q C"]:
  """Computes cosines with centroids, the highest of a group's heads."""
  cosines = np.einsum("gqd,gcd->gqc", unit(queries), unit(centroids))
  return cosines.max(axis=0)


def _draw(by_probes: Mapping[int, Float[np.ndarray, "B L 3"]]) -> Figure:
  """Draws means over layers, and the range of layers."""
  figure = figures.canvas(7.6, 3.2)
  panels: Sequence = figure.subplots(1, 2)
  probes = list(by_probes)
  for axes, place, label, scale in (
    (panels[0], 0, "alpha: distinct share of the lists", 1.0),
    (panels[1], 2, "% of the best keys that lists hold", 100.0),
  ):
    values = scale * np.array(
      [layers[..., place].mean(axis=0) for layers in by_probes.values()]
    )
    low, mean, high = (f(values, axis=1) for f in (np.min, np.mean, np.max))
    axes.fill_between(probes, low, high, color=figures.BLUE, alpha=0.2)
    axes.plot(probes, mean, "o-", color=figures.BLUE, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(probes, [str(count) for count in probes])
    axes.set_ylim(0, 1.04 * scale)
    figures.finish(axes, "C', lists recalled", label)
  return figure
