"""Lines that are named at their right ends, told apart in any eyes."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

# From the palettes of Okabe and Ito and of Tol, which color-blind readers tell
# apart. Markers and dashes differ as well, and no two lines share all three.
_COLORS = (
  "#332288",
  "#D55E00",
  "#117733",
  "#CC79A7",
  "#56B4E9",
  "#E69F00",
  "#000000",
  "#882255",
  "#44AA99",
  "#999933",
  "#CC6677",
  "#654522",
  "#0077BB",
)
_MARKERS = "osD^vXp*<>h"
_DASHES = ((), (7, 1.5), (3, 1), (5, 1, 1.5, 1), (1.5, 0.8))
_GREY = "#666666"
# Least distance of two labels in points of score, on axes of usual height.
_LABEL_GAP = 5.4
_LABELS = 18


@dataclasses.dataclass(frozen=True)
class Line:
  """A method's points, its end last.

  Attributes:
    name: what the line is labelled.
    places: x and a score of each point.
    color: of line and markers.
    marker: of the points.
    dashes: lengths in points; none for a whole line.
    shared: how many of the first points belong to all lines, and get no marker.
    level: whether the line is there to measure others by its score.
  """

  name: str
  places: Sequence[tuple[float, float]]
  color: str = _GREY
  marker: str = "_"
  dashes: tuple[float, ...] = ()
  shared: int = 0
  level: bool = False


def styled(
  name: str, places: Sequence[tuple[float, float]], index: int, shared: int = 0
) -> Line:
  """The line of the method with this index, in its color and dashes."""
  return Line(
    name,
    places,
    _COLORS[index % len(_COLORS)],
    _MARKERS[index % len(_MARKERS)],
    _DASHES[index % len(_DASHES)],
    shared,
  )


def size(lines: Sequence[Line]) -> tuple[float, float]:
  """Width and height in inches that leave room for all labels."""
  longest = max(len(line.name) for line in lines)
  return 6.6 + 0.085 * max(0, longest - _LABELS), 4.2 * _crowd(len(lines))


def draw(axes: Axes, lines: Sequence[Line]) -> None:
  """The lines, from end to end, and levels through the whole picture."""
  for line in lines:
    if line.level:
      y = line.places[-1][1]
      axes.axhline(y, color=line.color, linewidth=0.8, zorder=1)
      continue
    x, scores = np.array(line.places).T
    axes.plot(
      x,
      scores,
      color=line.color,
      dashes=line.dashes,
      linewidth=1.4,
      marker=line.marker,
      markersize=5.5,
      markeredgecolor="white",
      markeredgewidth=0.5,
      markevery=slice(line.shared, None),
      clip_on=False,
    )


def draw_labels(axes: Axes, lines: Sequence[Line]) -> None:
  """Names the lines at the right, each as near to its end as there is room."""
  lines = sorted(lines, key=lambda line: [y for _, y in line.places[::-1]])
  heights = spread([line.places[-1][1] for line in lines])
  for height, line in zip(heights, lines, strict=True):
    axes.annotate(
      "",
      xy=(1.0, line.places[-1][1]),
      xytext=(1.05, height),
      xycoords=("axes fraction", "data"),
      textcoords=("axes fraction", "data"),
      arrowprops={"arrowstyle": "-", "color": "#BBBBBB", "linewidth": 0.6},
      annotation_clip=False,
    )
    axes.plot(
      1.05,
      height,
      transform=axes.get_yaxis_transform(),
      color=line.color,
      marker=line.marker,
      markersize=5.5,
      clip_on=False,
    )
    axes.text(
      1.075,
      height,
      line.name,
      transform=axes.get_yaxis_transform(),
      fontsize=9,
      va="center",
      parse_math=False,
    )


def spread(heights: Sequence[float]) -> list[float]:
  """Ascending heights between 0 and 100, moved apart so that labels fit."""
  spread = np.array(heights, float)
  gap = _LABEL_GAP / _crowd(len(spread))
  for _ in range(50 * len(spread)):
    overlap = np.maximum(gap - np.diff(spread), 0) / 2
    spread[:-1] -= overlap
    spread[1:] += overlap
    spread[0] = max(spread[0], 0)
    spread[-1] = min(spread[-1], 100)
  return spread.tolist()


def _crowd(count: int) -> float:
  """How much higher a picture must be for so many labels."""
  return max(1.0, count / _LABELS)
