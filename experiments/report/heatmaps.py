"""Heatmaps of scores by length and depth."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from kvjax.experiments.report import figures, formats, wording
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
_COLUMNS = 4
# Sizes in inches: a cell with and without its number, the space between maps, a
# title line; the margins of the figure with its color bar and its title; the
# least and most that cells of a map take in width.
_CELL, _PLAIN = (0.36, 0.18), (0.14, 0.12)
_BETWEEN, _LINE = (0.15, 0.1), 0.13
_MARGINS = (1.6, 0.95)
_LEAST, _MOST = 1.5, 2.9
# Maximum height of the color bar.
_BAR = 4.0
# With more lengths or depths, cells have no numbers.
_NUMBERED = (8, 16)
_SMALL, _TITLE = 6, 7.5


def heatmaps(summary: Summary) -> Figure:
  """Plots a map per method and budget in one grid, the full cache first.

  A cell shows the mean score of all tasks, 0 to 1. Up to four budgets of a
  method stand side by side.
  """
  groups = grouped(summary["rows"])
  lengths = sorted({row["length"] for row in summary["rows"]})
  depths = sorted({row["depth"] for row in summary["rows"]})
  numbered = len(lengths) <= _NUMBERED[0] and len(depths) <= _NUMBERED[1]
  cell = _CELL if numbered else _PLAIN
  width = min(max(_LEAST, cell[0] * len(lengths)), _MOST)
  titles = {name: _title(name, groups[name], width) for name in groups}
  slots, columns = _arranged(list(groups))
  rows = len(slots) // columns
  lines = 1 + max(title.count("\n") for title in titles.values())
  figure = figures.canvas(
    columns * (width + _BETWEEN[0]) + _MARGINS[0],
    rows * (cell[1] * len(depths) + _BETWEEN[1] + _LINE * lines) + _MARGINS[1],
    wording.title(summary),
  )
  panels = figure.subplots(rows, columns, squeeze=False)
  for place, (axes, name) in enumerate(zip(panels.flat, slots, strict=True)):
    if name is None:
      axes.set_axis_off()
      continue
    axes.set_title(titles[name], fontsize=_TITLE, loc="left", parse_math=False)
    _draw(axes, _grid(groups[name], lengths, depths), numbered)
    _name_cells(axes, lengths, depths, numbered)
    is_last = not any(slots[place + columns :: columns])
    axes.tick_params(labelleft=place % columns == 0, labelbottom=is_last)
  figure.supxlabel("tokens", fontsize=_TITLE)
  figure.supylabel("depth (%)", fontsize=_TITLE)
  bar = figure.colorbar(
    ScalarMappable(Normalize(0, 1), COLORS),
    ax=panels,
    shrink=min(1.0, _BAR / figure.get_figheight()),
    anchor=(0.0, 1.0),
    aspect=30,
    pad=0.01,
  )
  bar.set_label(f"share of {wording.scored(summary)}", fontsize=_TITLE)
  bar.ax.tick_params(labelsize=_SMALL)
  bar.outline.set_visible(False)
  return figure


def _arranged(names: Sequence[Name]) -> tuple[list[Name | None], int]:
  """Arranges maps in the slots of a grid, row by row; returns its columns too.

  The budgets of a method stand in one row if they fit; then slots of methods
  with fewer budgets are left empty.
  """
  methods: dict[str, list[Name | None]] = {}
  for name in names:
    methods.setdefault(name[0], []).append(name)
  most = max(map(len, methods.values()))
  width = most if most <= _COLUMNS else 1
  slots: list[Name | None] = []
  for own in methods.values():
    slots += own + [None] * (-len(own) % width)
  columns = min(_COLUMNS // width * width, len(slots))
  return slots + [None] * (-len(slots) % columns), columns


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
    rotation=90 if lengths[-1] >= 10_000 or not numbered else 0,
  )
  axes.set_yticks(
    range(0, len(depths), every),
    [f"{100 * depth:.0f}" for depth in depths[::every]],
  )
  axes.tick_params(labelsize=_SMALL, length=0)
  axes.spines[:].set_visible(False)
