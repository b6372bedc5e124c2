"""E3.9: attention with and without the causal mask inside a chunk."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from kvjax.experiments.papers.analyses.observed import (
  activations,
  kv_head_weights,
)
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report import figures
from kvjax.experiments.report.formats import Table

# Compactor's chunk, tokens on each side of the diagonal, the share of keys that
# are stripes, and tokens to name. Weights below the least one look alike.
_CHUNK, _BAND, _STRIPES, _NAMED = 256, 4, 0.05, 8
_LEAST = 1e-4
_PANELS = 6


class Shares(NamedTuple):
  """Where the attention of a map goes, as shares of all of it.

  Attributes:
    stripes: to the twentieth of the keys that receive most.
    band: to keys at most four tokens away.
    ahead: to keys after the query.
  """

  stripes: float
  band: float
  ahead: float


def measure(subject: Subject) -> Findings:
  """Compares the first chunk of a prompt, layer by layer."""
  layers = activations(subject.lm, subject.rows[0])
  tokens = list(subject.rows[0][:_CHUNK])
  lines, columns, maps = [], [], {}
  for number, layer in enumerate(layers):
    pairs = [
      [kv_head_weights(layer, head, _CHUNK, causal) for causal in (True, False)]
      for head in range(layer.keys.shape[1])
    ]
    masked, free = (
      np.mean([shares(pair[side]) for pair in pairs], axis=0) for side in (0, 1)
    )
    lines.append([str(number), *_percent(masked[:2]), *_percent(free)])
    columns += [pair[1].mean(axis=0) for pair in pairs]
    maps[number] = pairs[0]
  header = [
    *("layer", "stripes", "diagonal", "stripes, no mask"),
    *("diagonal, no mask", "later keys, no mask"),
  ]
  title = f"% of the attention in the first {len(tokens)} tokens, heads' mean"
  return Findings(
    [
      Table(title, header, lines),
      _anchors(subject, tokens, np.mean(columns, axis=0)),
    ],
    [
      f"Stripes are the {100 * _STRIPES:g} % of the keys that receive most, "
      f"the diagonal is at most {_BAND} tokens wide on each side. Logits are "
      "divided by the root of the head dimension in both, unlike in "
      "Compactor's score, which has no such factor. Maps show KV head 0, mean "
      "over its query heads."
    ],
    {
      "mask.png": _draw_masked(maps),
      "layers.png": _draw_layers(
        {number: free for number, (_, free) in maps.items()}
      ),
    },
  )


def shares(attention: Float[np.ndarray, "T T"]) -> Shares:
  """Computes where the attention of a map goes."""
  length = len(attention)
  columns = np.sort(attention.sum(axis=0))[::-1]
  stripes = max(1, round(_STRIPES * length))
  away = np.arange(length)[None] - np.arange(length)[:, None]
  total = attention.sum()
  return Shares(
    float(columns[:stripes].sum() / total),
    float(attention[abs(away) <= _BAND].sum() / total),
    float(attention[away > 0].sum() / total),
  )


def _percent(values: Float[np.ndarray, " P"]) -> list[str]:
  return [f"{100 * value:.1f}" for value in values]


def _anchors(
  subject: Subject, tokens: Sequence[int], received: Float[np.ndarray, " T"]
) -> Table:
  """Names the tokens that receive most without the mask."""
  best = np.argsort(-received, kind="stable")[:_NAMED]
  lines = [
    [
      str(place),
      _quoted(subject.lm.text.decode([tokens[place]])),
      f"{len(tokens) * received[place]:.1f}",
    ]
    for place in best.tolist()
  ]
  header = ["position", "token", "× an even share"]
  return Table(
    "tokens that receive most without the mask, mean over layers and heads",
    header,
    lines,
    names=2,
  )


def _quoted(text: str) -> str:
  return json.dumps(text, ensure_ascii=False) if text else "(special token)"


def _draw_masked(
  maps: Mapping[int, Sequence[Float[np.ndarray, "T T"]]],
) -> Figure:
  """Draws the middle layer with and without the mask."""
  number = list(maps)[len(maps) // 2]
  return _draw_logarithmic(
    {
      f"causal, layer {number}": maps[number][0],
      f"without mask, layer {number}": maps[number][1],
    },
    2,
  )


def _draw_layers(maps: Mapping[int, Float[np.ndarray, "T T"]]) -> Figure:
  """Draws a few layers from the first to the last without the mask."""
  chosen = np.unique(np.linspace(0, len(maps) - 1, _PANELS).round().astype(int))
  numbers = [list(maps)[place] for place in chosen.tolist()]
  return _draw_logarithmic(
    {f"without mask, layer {number}": maps[number] for number in numbers}, 3
  )


def _draw_logarithmic(
  maps: Mapping[str, Float[np.ndarray, "T T"]], columns: int
) -> Figure:
  rows = -(-len(maps) // columns)
  figure = figures.canvas(3.1 * columns + 0.9, 3.1 * rows + 0.2)
  drawn = figures.panels(figure, len(maps), columns)
  for axes, (title, cells) in zip(drawn, maps.items(), strict=True):
    image = axes.imshow(
      np.maximum(cells, _LEAST), cmap="magma", norm=LogNorm(_LEAST, 1.0)
    )
    figures.finish(axes, "key", "query", title, framed=True)
  figures.color_bar(figure, image, drawn, "attention weight")
  return figure
