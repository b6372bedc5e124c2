"""Plots of scores by numbers: a size that cells have, or varied parameters."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.experiments.papers.compare_to_paper import PaperComparison
from kvjax.experiments.report import figures, lines
from kvjax.experiments.report.lines import Line, Point, styled
from kvjax.experiments.run.candidates import FULL

# A line such as "C' = 4", or "rho = 2.5 rho'", in units of rho'.
_NAMED = re.compile(
  r"(?P<name>.+) = (?P<value>\d+(?:\.\d+)?)(?: (?P<unit>.+))?"
)
_GUIDE = "#BBBBBB"
# In inches: a panel, the narrowest figure, a letter and a handle of the legend.
_PANEL, _LEAST = (3.1, 2.9), 6.2
_LETTER, _HANDLE = 0.065, 0.6
_COLUMNS = 4


class _Panel(NamedTuple):
  """A number that cells have.

  Attributes:
    name: what it is.
    numbers: its value by line and column.
    guides: values that the paper's picture marks.
  """

  name: str
  numbers: Mapping[tuple[str, str], float]
  guides: Sequence[int] = ()


def draw(compared: PaperComparison) -> dict[str, Figure]:
  """Plots the headline by a size or by parameters; returns plots by name.

  There is a curve for each line of a size, and for each column of a parameter.
  Bars are 95 % intervals. The paper's numbers are shown at its own scale only.
  """
  size = compared.comparison.size
  if size is not None and compared.sizes:
    panel = _Panel(size.name, compared.sizes, size.guides)
    return {"by_size": _draw(compared, [panel], by_line=True)}
  headline = next(iter(compared.averages), None)
  swept = parameters([k.line for k in compared.ours if k.what == headline])
  columns = [column.name for column in compared.comparison.columns]
  panels = [
    _Panel(name, {(x, c): value for x, value in own.items() for c in columns})
    for name, own in swept.items()
  ]
  return {"sweeps": _draw(compared, panels)} if panels else {}


def parameters(names: Sequence[str]) -> dict[str, dict[str, float]]:
  """Groups lines by the parameter that they vary, with their values of it.

  Parameters with a single value are left out.
  """
  groups: dict[str, dict[str, float]] = {}
  for name in names:
    match = _NAMED.fullmatch(name)
    if match:
      unit = f" / {match['unit']}" if match["unit"] else ""
      group = groups.setdefault(f"{match['name']}{unit}", {})
      group[name] = float(match["value"])
  return {name: values for name, values in groups.items() if len(values) > 1}


def _draw(
  compared: PaperComparison, panels: Sequence[_Panel], by_line: bool = False
) -> Figure:
  columns = min(_COLUMNS, len(panels))
  rows = -(-len(panels) // columns)
  width = max(columns * _PANEL[0] + 0.4, _LEAST)
  figure = figures.canvas(width, rows * _PANEL[1] + 0.6)
  places = figures.panels(figure, len(panels), columns)
  # A curve looks the same in all panels.
  styles: dict[str, int] = {}
  for axes, panel in zip(places, panels, strict=True):
    _finish(axes, panel)
    lines.draw(axes, list(_curves(compared, panel, by_line, styles)))
  headline = next(iter(compared.averages))
  figures.label_sides(figure, y=f"{compared.comparison.name}: {headline}")
  label_width = _LETTER * max(map(len, styles)) + _HANDLE
  figures.legend(figure, places, max(1, int(width / label_width)))
  return figure


def _finish(axes: Axes, panel: _Panel) -> None:
  """Sets the axes of a panel, and marks the paper's values."""
  for guide in panel.guides:
    axes.axvline(guide, color=_GUIDE, linewidth=0.8, zorder=0)
  ticks = sorted({*panel.numbers.values(), *panel.guides})
  axes.set_xscale("symlog", base=2, linthresh=1)
  axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
  axes.set_xticks([], minor=True)
  axes.set_ylim(*lines.heights(100))
  figures.finish(axes, panel.name)


def _curves(
  compared: PaperComparison,
  panel: _Panel,
  by_line: bool,
  styles: dict[str, int],
) -> Iterator[Line]:
  """Yields the curves of a panel; by line, also levels of the full cache."""
  full = {x.name for x in compared.comparison.lines if x.paper.method == FULL}
  for model, scores in _scores(compared).items():
    curves: dict[str, list[Point]] = {}
    for place, score in scores.items():
      if place in panel.numbers:
        points = curves.setdefault(place[0 if by_line else 1], [])
        points.append(score._replace(x=panel.numbers[place]))
      elif by_line and place[0] in full:
        curves[place[0]] = [score._replace(interval=None)]
    for name, points in curves.items():
      label = f"{model}, {name}"
      index = styles.setdefault(label, len(styles))
      curve = styled(label, sorted(points, key=lambda p: p.x), index)
      yield dataclasses.replace(curve, level=by_line and name in full)


def _scores(
  compared: PaperComparison,
) -> dict[str, dict[tuple[str, str], Point]]:
  """Returns headlines by line and column, ours and those of each model."""
  scores = {
    "ours": {k: Point(0, n.score, n.interval) for k, n in compared.ours.items()}
  }
  if compared.scale == "paper":
    for targets in compared.comparison.targets:
      scores[targets.model] = {
        key: Point(0, number) for key, number in targets.numbers.items()
      }
  headline = next(iter(compared.averages))
  return {
    model: {
      (key.line, key.column): score
      for key, score in own.items()
      if key.what == headline
    }
    for model, own in scores.items()
  }
