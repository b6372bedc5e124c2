"""E2.11: cosines of a prompt's first keys, and the attention they receive."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from kvjax.experiments.papers.analyses.drawing import scaled_layer
from kvjax.experiments.papers.analyses.observed import (
  activations,
  kv_head_weights,
  unit,
)
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report import figures
from kvjax.experiments.report.formats import Table

# The paper's tokens, layers and KV head, and its model's number of layers.
_TOKENS, _LAYERS, _OF, _HEAD = 64, (2, 11), 28, 1
# Keys that are compared with the others.
_DISTINCT = 4


class _Head(NamedTuple):
  """Cosines of a head's keys, and the attention that these receive."""

  layer: int
  head: int
  alike: Float[np.ndarray, "T T"]
  attention: Float[np.ndarray, "T T"]


def measure(subject: Subject) -> Findings:
  """Shows two heads of the first prompt."""
  layers = activations(subject.lm, subject.rows[0])
  heads = []
  for number in sorted({scaled_layer(x, _OF, len(layers)) for x in _LAYERS}):
    layer = layers[number]
    head = min(_HEAD, layer.keys.shape[1] - 1)
    keys = np.asarray(layer.keys[0, head, :_TOKENS], np.float64)
    attention = kv_head_weights(layer, head, _TOKENS, True)
    heads.append(_Head(number, head, cosines(keys), attention))
  header = [
    *("layer", "KV head", "their cosine with others", "cosine of all"),
    *("% of the attention they get", "% if it were even"),
  ]
  title = (
    f"the {_DISTINCT} of the first {len(heads[0].alike)} keys that are least "
    "like the others"
  )
  return Findings(
    [Table(title, header, [_line(head) for head in heads], names=2)],
    [
      "Layers are as deep as the paper's 2 and 11 of 28. Inferred: its heads "
      "are KV heads; attention is the mean over the query heads of a KV head."
    ],
    {"keys_and_attention.png": _draw(heads)},
  )


def cosines(keys: Float[np.ndarray, "T D"]) -> Float[np.ndarray, "T T"]:
  """Computes the cosines of all pairs of keys."""
  units = unit(keys)
  return units @ units.T


def least_alike(alike: Float[np.ndarray, "T T"], count: int) -> list[int]:
  """Lists the keys with the lowest mean cosine with the others."""
  others = (alike.sum(axis=1) - alike.diagonal()) / max(len(alike) - 1, 1)
  return np.argsort(others, kind="stable")[:count].tolist()


def _line(head: _Head) -> list[str]:
  """Describes the least alike keys: their cosines, and their attention."""
  alike = head.alike
  length = len(alike)
  chosen = least_alike(alike, _DISTINCT)
  # A query that attends evenly gives each of the keys it sees the same.
  even = np.tri(length) / np.arange(1, length + 1)[:, None]
  others = ~np.eye(length, dtype=bool)
  return [
    str(head.layer),
    str(head.head),
    f"{alike[chosen][others[chosen]].mean():.2f}",
    f"{alike[others].mean():.2f}",
    f"{100 * head.attention[:, chosen].sum() / length:.1f}",
    f"{100 * even[:, chosen].sum() / length:.1f}",
  ]


def _draw(heads: Sequence[_Head]) -> Figure:
  """Draws a row per head: the cosines of its keys, and their attention."""
  figure = figures.canvas(8.0, 3.5 * len(heads))
  panels = figure.subplots(len(heads), 2, squeeze=False)
  for (left, right), head in zip(panels, heads, strict=True):
    place = f"layer {head.layer}, KV head {head.head}"
    for axes, cells, title, least, colors, rows in (
      (left, head.alike, "cosines of keys", -1, "RdBu_r", "key"),
      (right, head.attention, "attention weights", 0, "viridis", "query"),
    ):
      image = axes.imshow(cells, cmap=colors, vmin=least, vmax=1)
      figures.finish(axes, "key", rows, f"{title}, {place}", framed=True)
      figures.color_bar(figure, image, [axes])
  return figure
