"""Heatmaps of scores by length and depth."""

import itertools
import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvjax.experiments.report import formats, wording
from kvjax.experiments.report.means import (
  Name,
  Row,
  Summary,
  grouped,
  mean_of,
  score,
)

# Red to green with increasing lightness, for color-blind readers.
COLORS = LinearSegmentedColormap.from_list(
  "found", ["#7A1616", "#BF3B12", "#E0861C", "#EFC04A", "#D0F0B4"]
)
_MISSING = "#E4E4E4"
_DARK = 0.32
# Sizes in inches: a cell with and without its number, the margins of a map, a
# title line; the minimum widths of a map and of the figure.
_CELL, _PLAIN = (0.36, 0.24), (0.14, 0.12)
_AROUND, _LINE = (0.6, 0.6), 0.13
_LEAST, _LEAST_ALL = 1.9, 3.6
# With more lengths or depths, cells have no numbers.
_NUMBERED = 16
_SMALL, _TITLE = 6, 7.5


def heatmaps(summary: Summary) -> Figure:
  """Plots a map per method and budget: a row per method, the full cache first.

  A cell shows the mean score of all tasks, 0 to 1.
  """
  groups = grouped(summary["rows"])
  lengths = sorted({row["length"] for row in summary["rows"]})
  depths = sorted({row["depth"] for row in summary["rows"]})
  methods: dict[str, list[Name]] = {}
  for name in groups:
    methods.setdefault(name[0], []).append(name)
  numbered = max(len(lengths), len(depths)) <= _NUMBERED
  cell = _CELL if numbered else _PLAIN
  width = max(_LEAST, cell[0] * len(lengths) + _AROUND[0])
  titles = {name: _title(name, groups[name], width) for name in groups}
  extra = max(title.count("\n") for title in titles.values()) * _LINE
  height = cell[1] * len(depths) + _AROUND[1] + extra
  columns = max(map(len, methods.values()))
  figure = Figure(
    figsize=(max(columns * width, _LEAST_ALL), len(methods) * height + 0.4),
    layout="constrained",
  )
  FigureCanvasAgg(figure)
  heading = textwrap.fill(
    wording.title(summary), int(figure.get_figwidth() * 16)
  )
  figure.suptitle(heading, fontsize=8, x=0.02, ha="left", parse_math=False)
  panels = figure.subplots(len(methods), columns, squeeze=False)
  for row, names in zip(panels, methods.values(), strict=True):
    for axes, name in itertools.zip_longest(row, names):
      if name is None:
        axes.set_axis_off()
        continue
      axes.set_title(
        titles[name], fontsize=_TITLE, loc="left", parse_math=False
      )
      _draw(axes, _grid(groups[name], lengths, depths), numbered)
      _name_cells(axes, lengths, depths, numbered)
  return figure


def ink(share: float) -> str:
  """Chooses a readable color for the number in a cell."""
  return "white" if share < _DARK else "black"


def _title(name: Name, rows: Sequence[Row], width: float) -> str:
  """Formats the method and its mean, in lines as wide as a map."""
  method = formats.at_options(name[0], int(width * 13))
  mean = mean_of(rows, score) / 100
  return f"{method}\n{wording.budget(*name)}: mean {mean:.2f}"


def _grid(
  rows: Sequence[Row], lengths: Sequence[int], depths: Sequence[float]
) -> Float[np.ndarray, "Z X"]:
  """Computes scores by depth and length, NaN for missing cells."""
  cells: dict[tuple[float, int], list[Row]] = {}
  for row in rows:
    cells.setdefault((row["depth"], row["length"]), []).append(row)
  grid = np.full((len(depths), len(lengths)), np.nan)
  for (depth, length), group in cells.items():
    share = mean_of(group, score) / 100
    grid[depths.index(depth), lengths.index(length)] = share
  return grid


def _draw(axes: Axes, grid: Float[np.ndarray, "Z X"], numbered: bool) -> None:
  axes.set_facecolor(_MISSING)
  axes.imshow(grid, cmap=COLORS, vmin=0, vmax=1, aspect="auto")
  if not numbered:
    return
  for (depth, length), share in np.ndenumerate(grid):
    if np.isfinite(share):
      axes.text(
        length,
        depth,
        f"{share:.2f}",
        color=ink(share),
        fontsize=_SMALL,
        ha="center",
        va="center",
      )


def _name_cells(
  axes: Axes, lengths: Sequence[int], depths: Sequence[float], numbered: bool
) -> None:
  every = 1 if numbered else 5
  axes.set_xticks(
    range(0, len(lengths), every),
    [str(length) for length in lengths[::every]],
    rotation=90 if lengths[-1] >= 100_000 or not numbered else 0,
  )
  axes.set_yticks(
    range(0, len(depths), every),
    [f"{100 * depth:.0f}" for depth in depths[::every]],
  )
  axes.tick_params(labelsize=_SMALL, length=0)
  axes.set_xlabel("tokens", fontsize=_SMALL)
  axes.set_ylabel("depth (%)", fontsize=_SMALL)
  axes.spines[:].set_visible(False)
