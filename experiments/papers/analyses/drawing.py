"""Figures of analyses: an empty canvas, and maps of a value per head."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Font sizes in points.
_TITLE, LABEL, TICK = 9, 8, 7
# For color-blind readers: of a kind, of another, and what stands out.
GRAY, BLUE, ORANGE, DARK = "#C8C8C8", "#0077BB", "#EE7733", "#222222"

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


def canvas(width: float, height: float) -> Figure:
  """Creates an empty figure, in inches, without pyplot's global state."""
  return Figure(figsize=(width, height), layout="constrained")


def finish(
  axes: Axes, x: str = "", y: str = "", title: str = "", framed: bool = False
) -> None:
  """Labels a panel in the sizes of all pictures; matrices are framed."""
  axes.set_title(title, fontsize=_TITLE)
  axes.set_xlabel(x, fontsize=LABEL)
  axes.set_ylabel(y, fontsize=LABEL)
  axes.tick_params(labelsize=TICK)
  if not framed:
    axes.spines[["top", "right"]].set_visible(False)


def scaled_layer(layer: int, of: int, layers: int) -> int:
  """Finds the layer at the depth of another model's layer."""
  return min(round(layer * layers / of), layers - 1)


def head_maps(maps: Sequence[HeadMap]) -> Figure:
  """Draws maps side by side: layers downward, heads to the right."""
  sizes = [_size(one) for one in maps]
  figure = canvas(
    sum(width for width, _ in sizes), max(height for _, height in sizes)
  )
  panels = figure.subplots(
    1, len(maps), squeeze=False, width_ratios=[width for width, _ in sizes]
  )[0]
  for axes, one in zip(panels, maps, strict=True):
    limits = (-1.0, 1.0) if one.cosine else (0.0, None)
    image = axes.imshow(
      grid(one.layers),
      aspect="auto",
      cmap="RdBu_r" if one.cosine else "viridis",
      vmin=limits[0],
      vmax=limits[1],
    )
    finish(axes, "head", "layer", one.title, framed=True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes).ax.tick_params(labelsize=TICK)
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
