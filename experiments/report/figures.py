"""The style of all pictures, and the parts that they are built of."""

import textwrap
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

# Font sizes in points.
TITLE, LABEL, TICK = 9, 9, 8
# For color-blind readers: of a kind, of another, and what stands out.
GRAY, BLUE, ORANGE, DARK = "#C8C8C8", "#0077BB", "#EE7733", "#222222"
# Letters of a title per inch, and the height of a line of it in inches.
_LETTERS, _LINE = 14, 0.17


def canvas(width: float, height: float, title: str = "") -> Figure:
  """Creates an empty figure, in inches, without pyplot's global state.

  A title stands above; each line after its first adds to the height.
  """
  heading = textwrap.fill(title, int(width * _LETTERS))
  height += _LINE * heading.count("\n")
  figure = Figure(figsize=(width, height), layout="constrained")
  if title:
    figure.suptitle(
      heading, fontsize=TITLE, x=0.02, ha="left", parse_math=False
    )
  return figure


def panels(
  figure: Figure, count: int, columns: int, **shared: Any
) -> list[Axes]:
  """Creates panels row by row; places that are left stay empty.

  Args:
    figure: where they stand.
    count: how many.
    columns: places in a row.
    **shared: arguments of `Figure.subplots`.
  """
  grid = figure.subplots(-(-count // columns), columns, squeeze=False, **shared)
  for place in range(count, grid.size):
    grid.flat[place].set_axis_off()
    # The panel above it is the last of its column.
    if place >= columns:
      grid.flat[place - columns].tick_params(labelbottom=True)
  return list(grid.flat[:count])


def finish(
  axes: Axes,
  x: str = "",
  y: str = "",
  title: str = "",
  *,
  grid: Literal["x", "y", "both"] | None = None,
  framed: bool = False,
) -> None:
  """Labels a panel in the sizes of all pictures.

  Args:
    axes: the panel.
    x: label of the horizontal axis.
    y: label of the vertical axis.
    title: title.
    grid: the axes whose ticks have lines behind the data.
    framed: draw all edges, as those of matrices.
  """
  axes.set_title(title, fontsize=TITLE, loc="left", parse_math=False)
  axes.set_xlabel(x, fontsize=LABEL)
  axes.set_ylabel(y, fontsize=LABEL)
  axes.tick_params(labelsize=TICK)
  if grid:
    axes.grid(axis=grid, color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
  if not framed:
    axes.spines[["top", "right"]].set_visible(False)


def label_sides(figure: Figure, x: str = "", y: str = "") -> None:
  """Labels the axes that all panels share."""
  figure.supxlabel(x, fontsize=LABEL)
  figure.supylabel(y, fontsize=LABEL)


def color_bar(
  figure: Figure,
  image: AxesImage,
  beside: Sequence[Axes],
  label: str = "",
  **options: Any,
) -> None:
  """Explains an image's colors beside panels; see `Figure.colorbar`."""
  bar = figure.colorbar(image, ax=beside, **options)
  bar.set_label(label, fontsize=LABEL)
  bar.ax.tick_params(labelsize=TICK)


def legend(
  figure: Figure, shown: Sequence[Axes], columns: int = 4, right: bool = False
) -> None:
  """Explains the lines of panels, below or at the right; each name once."""
  named: dict[str, Artist] = {}
  for axes in shown:
    handles, labels = axes.get_legend_handles_labels()
    named |= dict(zip(labels, handles, strict=True))
  figure.legend(
    named.values(),
    named,
    loc="outside right center" if right else "outside lower center",
    ncols=columns,
    fontsize=TICK,
    frameon=False,
  )
