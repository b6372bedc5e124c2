"""E2.12: keys, queries and KeyDiff's anchor in one plane."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.activations import Activations
from kvjax.experiments.papers.analyses.drawing import scaled_layer
from kvjax.experiments.papers.analyses.observed import (
  activations,
  kv_head,
  unit,
)
from kvjax.experiments.papers.analyses.retained_keys import plane
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report import figures
from kvjax.experiments.report.formats import Table

# Layers and KV heads of the paper's other pictures of keys, and the number of
# its model's layers.
_PLACES, _OF = ((5, 3), (8, 1), (20, 0), (27, 4)), 28
# The share of keys with the highest scores, and the most points to draw.
_TOP, _POINTS = 0.05, 1500


class _Head(NamedTuple):
  """Keys of a KV head, queries of its group, and the keys that score most."""

  layer: int
  head: int
  keys: Float[np.ndarray, "T D"]
  queries: Float[np.ndarray, "Q D"]
  top: Int[np.ndarray, " M"]


def measure(subject: Subject) -> Findings:
  """Shows four heads of the first prompt."""
  layers = activations(subject.lm, subject.rows[0])
  places = dict.fromkeys(
    (number, head % layers[number].keys.shape[1])
    for number, head in (
      (scaled_layer(depth, _OF, len(layers)), head) for depth, head in _PLACES
    )
  )
  heads = [_head(layers[number], number, head) for number, head in places]
  lines = [
    [
      str(head.layer),
      str(head.head),
      *(f"{value:+.2f}" for value in cosines_with_mean_query(head)),
    ]
    for head in heads
  ]
  header = [
    "layer",
    "KV head",
    "anchor",
    f"top {100 * _TOP:g} % of keys",
    "other keys",
  ]
  return Findings(
    [Table(f"cosine with the mean query, {subject.described}", header, lines)],
    [
      "The plane is that of the first two principal components of keys and "
      "queries together. Top keys have KeyDiff's highest scores. Heads are, as "
      "deep in the model, those of the paper's other pictures of keys; "
      "inferred: it does not name those of this one."
    ],
    {"queries.png": _draw(heads)},
  )


def cosines_with_mean_query(head: _Head) -> tuple[float, float, float]:
  """Computes the cosines of the anchor, of top keys and of other keys.

  The anchor is the mean of unit keys. Those of keys are means.
  """
  units, query = unit(head.keys), unit(head.queries.mean(axis=0))
  products = units @ query
  others = np.delete(products, head.top)
  anchor = unit(units.mean(axis=0))
  return (
    float(anchor @ query),
    float(products[head.top].mean()),
    float(others.mean()),
  )


def _head(layer: Activations, number: int, head: int) -> _Head:
  """Collects a KV head, with its keys of the highest scores."""
  keys, queries = kv_head(layer, head)
  units = unit(keys)
  alike = units @ units.mean(axis=0)
  count = max(1, round(_TOP * len(keys)))
  top = np.argsort(alike, kind="stable")[:count]
  return _Head(number, head, keys, queries.reshape(-1, keys.shape[1]), top)


def _draw(heads: Sequence[_Head]) -> Figure:
  """Draws a panel per head."""
  figure = figures.canvas(8.4, 3.5 * -(-len(heads) // 2) + 0.4)
  drawn = figures.panels(figure, len(heads), 2)
  for axes, head in zip(drawn, heads, strict=True):
    _draw_head(axes, head)
  figures.legend(figure, drawn, columns=5)
  return figure


def _draw_head(axes: Axes, head: _Head) -> None:
  mean, directions = plane(np.concatenate([head.keys, head.queries]))

  # The anchor has a direction only; it is drawn as long as keys are.
  anchor = unit(unit(head.keys).mean(axis=0, keepdims=True))
  length = np.linalg.norm(head.keys, axis=1).mean()
  others = np.delete(head.keys, head.top, axis=0)
  mean_query = head.queries.mean(axis=0, keepdims=True)
  for label, rows, size, color, marker in (
    ("keys", others, 5, figures.GRAY, "o"),
    ("queries", head.queries, 5, figures.ORANGE, "o"),
    ("top keys", head.keys[head.top], 12, figures.BLUE, "o"),
    ("anchor", length * anchor, 90, figures.DARK, "*"),
    ("mean query", mean_query, 50, figures.DARK, "X"),
  ):
    step = -(-len(rows) // _POINTS)
    x, y = ((rows[::step] - mean) @ directions.T).T
    axes.scatter(x, y, s=size, color=color, marker=marker, label=label)
  title = f"layer {head.layer}, KV head {head.head}"
  figures.finish(axes, "first component", "second component", title)
