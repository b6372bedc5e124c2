"""E4.10: how alike neighboring queries are, and the keys that they want."""

import itertools

import numpy as np
from jaxtyping import Bool, Float

from kvjax.activations import Activations
from kvjax.experiments.paper_experiments.analyses.observed import activations
from kvjax.experiments.paper_experiments.findings import Findings, Subject
from kvjax.experiments.reporting.formats import Table

# The last queries of a prompt, whose pairs are compared, and the share of the
# keys before them that are a query's top ones: 5K of 96K.
_ASKING, _TOP = 64, 0.05
_BINS = (-1.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)


def measure(subject: Subject) -> Findings:
  """Cosines by distance, and overlaps of top keys by cosine."""
  by_layer: list[list[dict[int, float]]] = []
  pairs = []
  for row in subject.rows:
    for number, seen in enumerate(
      activations(subject.lm.model, subject.lm.params, row)
    ):
      if number == len(by_layer):
        by_layer.append([])
      queries = np.asarray(seen.queries[0], np.float64)
      by_layer[number].append(cosines_by_distance(queries))
      pairs.append(_pairs(seen))
  every = np.concatenate(pairs, axis=1)
  return Findings([_distances(by_layer), _overlaps(every)])


def cosines_by_distance(
  queries: Float[np.ndarray, "N S D"],
) -> dict[int, float]:
  """Mean cosine of queries so far apart, for distances 1, 2, 4 and so on."""
  units = queries / np.linalg.norm(queries, axis=-1, keepdims=True)
  found = {}
  distance = 1
  while distance < units.shape[1]:
    products = units[:, distance:] * units[:, :-distance]
    found[distance] = float(products.sum(axis=-1).mean())
    distance *= 2
  return found


def top_keys(
  queries: Float[np.ndarray, "Q D"], keys: Float[np.ndarray, "T D"], count: int
) -> Bool[np.ndarray, "Q T"]:
  """Which keys are among the so many of the highest product with a query."""
  best = np.argsort(-(queries @ keys.T), axis=1, kind="stable")[:, :count]
  chosen = np.zeros((len(queries), len(keys)), bool)
  np.put_along_axis(chosen, best, True, axis=1)
  return chosen


def _pairs(seen: Activations) -> Float[np.ndarray, "2 P"]:
  """Cosine and overlap of every pair of the last queries of each head."""
  queries = np.asarray(seen.queries[0], np.float64)
  keys = np.asarray(seen.keys[0], np.float64)
  asking = min(_ASKING, keys.shape[1] // 2)
  before = keys.shape[1] - asking
  count = max(1, round(_TOP * before))
  group = len(queries) // len(keys)
  one, other = np.triu_indices(asking, 1)
  found = []
  for head, own in enumerate(queries[:, before:]):
    chosen = top_keys(own, keys[head // group, :before], count)
    chosen = chosen.astype(np.float64)
    units = own / np.linalg.norm(own, axis=1, keepdims=True)
    cosines, shared = units @ units.T, chosen @ chosen.T / count
    found.append(np.stack([cosines[one, other], shared[one, other]]))
  return np.concatenate(found, axis=1)


def _distances(by_layer: list[list[dict[int, float]]]) -> Table:
  distances = sorted(set.intersection(*(set(x) for x in by_layer[0])))
  lines = []
  for distance in distances:
    layers = [
      float(np.mean([found[distance] for found in layer])) for layer in by_layer
    ]
    lines.append(
      [
        str(distance),
        f"{np.mean(layers):.2f}",
        f"{min(layers):.2f}",
        f"{max(layers):.2f}",
      ]
    )
  return Table(
    "cosine of two queries of a head, by their distance",
    ["tokens apart", "mean", "lowest layer", "highest layer"],
    lines,
  )


def _overlaps(pairs: Float[np.ndarray, "2 P"]) -> Table:
  cosines, shared = pairs
  lines = []
  for low, high in itertools.pairwise(_BINS):
    own = (cosines >= low) & ((cosines < high) | (high == _BINS[-1]))
    if own.any():
      mean = f"{100 * shared[own].mean():.1f}"
      lines.append([f"{low:g} to {high:g}", f"{own.sum():,}", mean])
  return Table(
    f"top {100 * _TOP:g} % of the keys that two queries share, by their cosine",
    ["cosine", "pairs", "% shared"],
    lines,
  )
