"""Maps of a value per head."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from kvjax.experiments.report import figures

_HEAD_WIDTH, _LAYER_HEIGHT = 0.24, 0.16
_MARGINS = (1.9, 1.1)
_LEAST = (3.0, 2.4)


class HeadMap(NamedTuple):
  """A value per head of every layer.

  Attributes:
    title: what it is.
    layers: values of each layer's heads.
    cosine: whether values lie in -1 to 1.
  """

  title: str
  layers: Sequence[Float[np.ndarray, " _"]]
  cosine: bool = True


def scaled_layer(layer: int, of: int, layers: int) -> int:
  """Finds the layer at the depth of another model's layer."""
  return min(round(layer * layers / of), layers - 1)


def head_maps(maps: Sequence[HeadMap]) -> Figure:
  """Draws maps side by side: layers downward, heads to the right."""
  sizes = [_size(one) for one in maps]
  figure = figures.canvas(
    sum(width for width, _ in sizes), max(height for _, height in sizes)
  )
  widths = [width for width, _ in sizes]
  drawn = figures.panels(figure, len(maps), len(maps), width_ratios=widths)
  for axes, one in zip(drawn, maps, strict=True):
    limits = (-1.0, 1.0) if one.cosine else (0.0, None)
    image = axes.imshow(
      grid(one.layers),
      aspect="auto",
      cmap="RdBu_r" if one.cosine else "viridis",
      vmin=limits[0],
      vmax=limits[1],
    )
    figures.finish(axes, "head", "layer", one.title, framed=True)
    axes.locator_params(integer=True)
    figures.color_bar(figure, image, [axes])
  return figure


def grid(layers: Sequence[Float[np.ndarray, " _"]]) -> Float[np.ndarray, "L H"]:
  """Stacks layers that may have different numbers of heads; NaN for none."""
  most = max(len(heads) for heads in layers)
  cells = np.full((len(layers), most), np.nan)
  for row, heads in zip(cells, layers, strict=True):
    row[: len(heads)] = heads
  return cells


def _size(one: HeadMap) -> tuple[float, float]:
  """Computes width and height of a map with its margins, in inches."""
  heads = max(len(layer) for layer in one.layers)
  return (
    max(_HEAD_WIDTH * heads + _MARGINS[0], _LEAST[0]),
    max(_LAYER_HEIGHT * len(one.layers) + _MARGINS[1], _LEAST[1]),
  )
