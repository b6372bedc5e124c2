"""E4.10: similarity of neighboring queries and of their top keys."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from kvjax.activations import Activations
from kvjax.experiments.papers.analyses.observed import activations, unit
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run.progress_bar import track

# Number of last queries of a prompt to compare in pairs, and the share of the
# earlier keys that count as top keys of a query: 5K of 96K.
_QUERIES, _TOP = 64, 0.05
# CTkvr's centroids: one for so many tokens, at most so many.
TOKENS_PER_CENTROID, MAX_CENTROIDS = 16, 2048
_BINS = (-1.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
_OVER_LAYERS = ("mean", "lowest layer", "highest layer")


class _Layer(NamedTuple):
  """A layer's cosines by distance and with the nearest centroid, and pairs."""

  cosines: Mapping[int, float]
  nearest: float
  pairs: Float[np.ndarray, "2 P"]


def measure(subject: Subject) -> Findings:
  """Measures cosines by distance, and overlaps of top keys by cosine."""
  rows = [
    [_of_layer(layer) for layer in activations(subject.lm, row)]
    for row in track(subject.rows)
  ]
  layers = list(zip(*rows, strict=True))
  pairs = np.concatenate([own.pairs for row in rows for own in row], axis=1)
  return Findings([_distances(layers), _nearest(layers), _overlaps(pairs)])


def cosine_of_nearest(queries: Float[np.ndarray, "N S D"]) -> float:
  """Computes the mean cosine of a query with CTkvr's nearest centroid.

  The last queries of the prompt stand for decoded tokens. The centroids of each
  are the queries before it.
  """
  units = unit(queries)
  length = units.shape[1]
  centroids = min(max(length // TOKENS_PER_CENTROID, 1), MAX_CENTROIDS)
  first = max(length - _QUERIES, centroids)
  best = [
    np.einsum("nd,ncd->nc", units[:, at], units[:, at - centroids : at]).max(1)
    for at in range(first, length)
  ]
  return float(np.mean(best))


def cosines_by_distance(
  queries: Float[np.ndarray, "N S D"],
) -> dict[int, float]:
  """Computes the mean cosine of queries at distances 1, 2, 4 and so on."""
  units = unit(queries)
  cosines = {}
  distance = 1
  while distance < units.shape[1]:
    products = units[:, distance:] * units[:, :-distance]
    cosines[distance] = float(products.sum(axis=-1).mean())
    distance *= 2
  return cosines


def highest(
  scores: Float[np.ndarray, "Q T"], count: int
) -> Bool[np.ndarray, "Q T"]:
  """Computes the mask of each row's highest scores; of ties, the first."""
  best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
  chosen = np.zeros(scores.shape, bool)
  np.put_along_axis(chosen, best, True, axis=1)
  return chosen


def _of_layer(layer: Activations) -> _Layer:
  queries = np.asarray(layer.queries[0], np.float64)
  return _Layer(
    cosines_by_distance(queries), cosine_of_nearest(queries), _pairs(layer)
  )


def _pairs(layer_activations: Activations) -> Float[np.ndarray, "2 P"]:
  """Computes cosine and overlap of all pairs of a head's last queries."""
  queries = np.asarray(layer_activations.queries[0], np.float64)
  keys = np.asarray(layer_activations.keys[0], np.float64)
  last_queries = min(_QUERIES, keys.shape[1] // 2)
  before = keys.shape[1] - last_queries
  count = max(1, round(_TOP * before))
  group = len(queries) // len(keys)
  one, other = np.triu_indices(last_queries, 1)
  pairs = []
  for head, head_queries in enumerate(queries[:, before:]):
    products = head_queries @ keys[head // group, :before].T
    chosen = highest(products, count).astype(np.float64)
    units = unit(head_queries)
    cosines, shared = units @ units.T, chosen @ chosen.T / count
    pairs.append(np.stack([cosines[one, other], shared[one, other]]))
  return np.concatenate(pairs, axis=1)


def _distances(by_layer: Sequence[Sequence[_Layer]]) -> Table:
  distances = sorted(set.intersection(*(set(x.cosines) for x in by_layer[0])))
  lines = []
  for distance in distances:
    cosines = [[own.cosines[distance] for own in x] for x in by_layer]
    lines.append([str(distance), *_over_layers(cosines)])
  return Table(
    "cosine of two queries of a head, by their distance",
    ["tokens apart", *_OVER_LAYERS],
    lines,
  )


def _nearest(by_layer: Sequence[Sequence[_Layer]]) -> Table:
  cosines = [[own.nearest for own in layer] for layer in by_layer]
  return Table(
    "cosine of a query with the nearest of CTkvr's centroids",
    ["", *_OVER_LAYERS],
    [["nearest centroid", *_over_layers(cosines)]],
  )


def _over_layers(cosines: Sequence[Sequence[float]]) -> list[str]:
  """Formats the mean of all layers' means, the lowest and the highest."""
  layers = [np.mean(layer) for layer in cosines]
  return [f"{of(layers):.2f}" for of in (np.mean, np.min, np.max)]


def _overlaps(pairs: Float[np.ndarray, "2 P"]) -> Table:
  cosines, shared = pairs
  lines = []
  for low, high in itertools.pairwise(_BINS):
    in_bin = (cosines >= low) & ((cosines < high) | (high == _BINS[-1]))
    if in_bin.any():
      mean = f"{100 * shared[in_bin].mean():.1f}"
      lines.append([f"{low:g} to {high:g}", f"{in_bin.sum():,}", mean])
  return Table(
    f"top {100 * _TOP:g} % of the keys that two queries share, by their cosine",
    ["cosine", "pairs", "% shared"],
    lines,
  )
