"""Plot lines with labels at their right ends, for color-blind readers too."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.transforms import ScaledTranslation

# From the color-blind palettes of Okabe and Ito and of Tol. Markers and dashes
# differ as well, and no two lines share all three.
_COLORS = (
  *("#332288", "#D55E00", "#117733", "#CC79A7", "#56B4E9", "#E69F00"),
  *("#000000", "#882255", "#44AA99", "#999933", "#CC6677", "#654522"),
  "#0077BB",
)
_MARKERS = "osD^vXp*<>h"
_DASHES = ((), (7, 1.5), (3, 1), (5, 1, 1.5, 1), (1.5, 0.8))
# Width in points, opacity and caps of the bars of intervals.
_BAR, _FAINT, _CAP = 1.2, 0.6, 2.0
# From one of these bars to the next, and to the last at most, in points.
_BESIDE, _ALL = 2.0, 14.0
_GRAY, _PALE = "#666666", "#D0D0D0"
# Minimum distance of two labels in score points, at the default height.
_LABEL_GAP = 5.4
_LABELS = 18
# Where labels' bars stand, in widths of the axes.
_SIDE = 1.025


class Point(NamedTuple):
  """A mean score.

  Attributes:
    x: the position.
    score: the score.
    interval: its confidence interval, if known.
  """

  x: float
  score: float
  interval: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Line:
  """The points of a method, from left to right.

  Attributes:
    name: label of the line; without one, it is faint and has no markers.
    points: its points.
    color: color of line and markers.
    marker: marker of the points.
    dashes: lengths in points; empty for a solid line.
    shared: number of leading points that all lines share, which get no marker.
    level: draw a horizontal reference line at its score instead.
  """

  name: str
  points: Sequence[Point]
  color: str = _GRAY
  marker: str = "_"
  dashes: tuple[float, ...] = ()
  shared: int = 0
  level: bool = False


def styled(
  name: str, points: Sequence[Point], index: int, shared: int = 0
) -> Line:
  """Creates the line of a method with the style of its index."""
  return Line(
    name,
    points,
    _COLORS[index % len(_COLORS)],
    _MARKERS[index % len(_MARKERS)],
    _DASHES[index % len(_DASHES)],
    shared,
  )


def size(lines: Sequence[Line]) -> tuple[float, float]:
  """Computes a width and height in inches that fit all labels."""
  names = [line.name for line in lines if line.name]
  longest = max(map(len, names))
  return 5.4 + 0.085 * max(0, longest - _LABELS), 4.2 * _crowd(len(names))


def draw(axes: Axes, lines: Sequence[Line]) -> None:
  """Draws the lines, and reference levels over the full width.

  Points stand where they are; the bars of their intervals stand side by side,
  in the order of the labels, as most of them would hide others.
  """
  barred = sorted(filter(_has_bars, lines), key=_rank)
  gaps = len(barred) - 1
  step = min(_BESIDE, _ALL / max(gaps, 1))
  shifts = {x.name: step * (n - gaps / 2) for n, x in enumerate(barred)}
  for line in lines:
    x, scores = np.array([point[:2] for point in line.points]).T
    if not line.name:
      axes.plot(x, scores, color=_PALE, linewidth=0.8, zorder=1)
      continue
    _draw_intervals(axes, line, shifts.get(line.name, 0.0))
    if line.level:
      axes.axhline(
        scores[-1], color=line.color, linewidth=0.8, zorder=1, label=line.name
      )
      continue
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
      label=line.name,
    )


def _has_bars(line: Line) -> bool:
  """Whether a line, which is no level, has intervals of its own."""
  own = line.points[line.shared :]
  return bool(line.name) and not line.level and any(p.interval for p in own)


def _draw_intervals(axes: Axes, line: Line, shift: float) -> None:
  """Draws bars with caps behind the points that all lines do not share."""
  figure = axes.get_figure(root=True)
  assert figure is not None
  beside = ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
  for point in line.points[line.shared :]:
    if point.interval is not None:
      axes.plot(
        [point.x, point.x],
        point.interval,
        color=line.color,
        linewidth=_BAR,
        marker="_",
        markersize=_CAP,
        alpha=_FAINT,
        zorder=1.5,
        clip_on=False,
        transform=axes.transData + beside,
      )


def draw_labels(axes: Axes, lines: Sequence[Line]) -> None:
  """Labels the lines at the right, each as close to its end as possible."""
  lines = sorted((line for line in lines if line.name), key=_rank)
  share = axes.get_ylim()[1] / heights(100)[1]
  places = [share * at for at in spread([_end(line) / share for line in lines])]
  labeled = list(zip(places, lines, strict=True))
  for score, group in itertools.groupby(labeled, lambda one: _end(one[1])):
    _draw_leader(axes, score, [height for height, _ in group])
  for height, line in labeled:
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


def heights(top: float) -> tuple[float, float]:
  """Limits of an axis of scores up to `top`, with room for markers."""
  return -0.03 * top, 1.03 * top


def _rank(line: Line) -> list[float]:
  """What lines are sorted by: the last score, then those before it."""
  return [point.score for point in line.points[::-1]]


def _end(line: Line) -> float:
  return line.points[-1].score


def _draw_leader(axes: Axes, score: float, heights: Sequence[float]) -> None:
  """Joins the end of lines with a bar along their labels.

  Where many methods fail alike, a leader for each would be a fan.
  """
  low, high = min(heights), max(heights)
  nearest = min(max(score, low), high)
  ends = [[(1.0, score), (_SIDE, nearest)], [(_SIDE, low), (_SIDE, high)]]
  leader = LineCollection(
    ends,
    colors="#BBBBBB",
    linewidths=0.8,
    clip_on=False,
    transform=axes.get_yaxis_transform(),
  )
  axes.add_collection(leader, autolim=False)


def spread(heights: Sequence[float]) -> list[float]:
  """Moves ascending heights in 0 to 100 apart so that labels do not overlap."""
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
  """Computes the height factor that this many labels need."""
  return max(1.0, count / _LABELS)
