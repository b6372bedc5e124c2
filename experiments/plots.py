"""Score against retention, one line per method."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.candidates import FULL
from experiments.tables import means, reads_less, title

# From the palettes of Okabe and Ito and of Tol, which colour-blind readers tell
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
# Lines are shifted sideways so that no point covers another: natural logarithm
# of retention, from line to line and from the first to the last at most.
_SHIFT, _SHIFTS = 0.022, 0.16
# Least distance of two labels, in points of score.
_LABEL_GAP = 5.4


@dataclasses.dataclass(frozen=True)
class _Line:
  name: str
  places: Sequence[tuple[float, float]]
  color: str
  marker: str
  dashes: tuple[float, ...] = ()


def score_vs_retention(summary: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws the mean score over the tasks; retention falls to the right.

  A point stands where the tokens are that were really kept, or are read of
  what was kept, since some methods keep more or less than their budget.

  Args:
    summary: as `summary.json` holds it.
    path: of the PNG.
  """
  points = means(summary["rows"])
  figure = Figure(figsize=(6.6, 4.2), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  axes.set_title(title(summary), fontsize=9, loc="left")
  _draw_frame(axes, sorted({point["retention"] for point in points}))
  kept = "read per token" if reads_less(points) else "kept"
  axes.set_xlabel(f"keys and values {kept}")
  full = [(1.0, p["score"]) for p in points if p["method"] == FULL]
  methods = list(dict.fromkeys(p["method"] for p in points))
  methods = [name for name in methods if name != FULL]
  shift = min(_SHIFT, _SHIFTS / max(len(methods), 1))
  lines = []
  for index, name in enumerate(methods):
    own = [
      (p["read_tokens"] / p["context_tokens"], p["score"])
      for p in points
      if p["method"] == name
    ]
    line = _Line(
      name,
      # At a retention of 1 every method is the full cache.
      [*full, *sorted(own, key=lambda place: -place[0])],
      _COLORS[index % len(_COLORS)],
      _MARKERS[index % len(_MARKERS)],
      _DASHES[index % len(_DASHES)],
    )
    lines.append(line)
    _draw_line(axes, line, len(full), shift * (index - (len(methods) - 1) / 2))
  if full:
    axes.axhline(full[0][1], color=_GREY, linewidth=0.8, zorder=1)
    lines.append(_Line("full cache", full, _GREY, "_"))
  _draw_labels(axes, lines)
  figure.savefig(path, dpi=200, format="png")


def _draw_frame(axes: Axes, ticks: Sequence[float]) -> None:
  axes.set_xscale("log")
  axes.set_xlim(ticks[-1] * 1.1, ticks[0] / 1.1)
  axes.xaxis.set_major_locator(FixedLocator(ticks))
  axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
  axes.xaxis.set_minor_locator(NullLocator())
  axes.set_ylim(-3, 103)
  axes.set_yticks(range(0, 101, 20))
  axes.set_ylabel("answers found, mean over tasks (%)")
  axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)


def _draw_line(axes: Axes, line: _Line, shared: int, shift: float) -> None:
  """One method; its first `shared` points belong to all methods."""
  retention, scores = np.array(line.places).T
  shifts = np.where(retention < 1, shift, 0.0)
  axes.plot(
    retention * np.exp(-shifts),
    scores,
    color=line.color,
    dashes=line.dashes,
    linewidth=1.4,
    marker=line.marker,
    markersize=5.5,
    markeredgecolor="white",
    markeredgewidth=0.5,
    markevery=slice(shared, None),
    clip_on=False,
  )


def _draw_labels(axes: Axes, lines: Sequence[_Line]) -> None:
  """Names the lines at the right, each as near to its end as there is room."""
  lines = sorted(lines, key=lambda line: [y for _, y in line.places[::-1]])
  heights = _spread([line.places[-1][1] for line in lines])
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
    )


def _spread(heights: Sequence[float]) -> list[float]:
  """Ascending heights, moved apart to `_LABEL_GAP` between 0 and 100.

  Where there are too many for that, they go beyond 100.
  """
  spread = np.array(heights, float)
  top = max(100.0, _LABEL_GAP * (len(spread) - 1))
  for _ in range(50 * len(spread)):
    overlap = np.maximum(_LABEL_GAP - np.diff(spread), 0) / 2
    spread[:-1] -= overlap
    spread[1:] += overlap
    spread[0] = max(spread[0], 0)
    spread[-1] = min(spread[-1], top)
  return spread.tolist()
