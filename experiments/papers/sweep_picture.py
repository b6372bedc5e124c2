"""A plot of scores by the parameters that a comparison's lines vary."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.experiments.papers.compare_to_paper import PaperComparison
from kvjax.experiments.papers.data_model import Key
from kvjax.experiments.report.lines import styled

# A line such as "C' = 4", or "rho = 2.5 rho'", in units of rho'.
_NAMED = re.compile(
  r"(?P<name>.+) = (?P<value>\d+(?:\.\d+)?)(?: (?P<unit>.+))?"
)
_LABEL, _TICK = 9, 8
# In inches: a panel, the narrowest figure, a letter and a handle of the legend.
_PANEL, _LEAST = (3.1, 2.9), 5.2
_LETTER, _HANDLE = 0.065, 0.6
_COLUMNS = 4


class Value(NamedTuple):
  """A value of a parameter, and the line that has it."""

  value: float
  line: str


def parameters(names: Sequence[str]) -> dict[str, list[Value]]:
  """Groups lines by the parameter that they vary, in ascending order.

  Parameters with a single value are left out.
  """
  groups: dict[str, list[Value]] = {}
  for name in names:
    match = _NAMED.fullmatch(name)
    if match:
      unit = f" / {match['unit']}" if match["unit"] else ""
      value = Value(float(match["value"]), name)
      groups.setdefault(f"{match['name']}{unit}", []).append(value)
  return {
    name: sorted(values) for name, values in groups.items() if len(values) > 1
  }


def ran(compared: PaperComparison) -> list[str]:
  """Lists the lines that have a headline of ours."""
  headline = next(iter(compared.averages), None)
  return list(
    dict.fromkeys(key.line for key in compared.ours if key.what == headline)
  )


def draw(compared: PaperComparison) -> Figure:
  """Plots the headline by each parameter, with a line per column.

  Bars are 95 % intervals. The paper's numbers are dashed, and shown at its own
  scale only.
  """
  groups = parameters(ran(compared))
  columns = min(_COLUMNS, len(groups))
  rows = -(-len(groups) // columns)
  width = max(columns * _PANEL[0] + 0.4, _LEAST)
  figure = Figure(figsize=(width, rows * _PANEL[1] + 0.6), layout="constrained")
  panels = figure.subplots(rows, columns, squeeze=False).ravel()
  for axes in panels[len(groups) :]:
    axes.set_axis_off()
  for axes, (name, values) in zip(panels, groups.items(), strict=False):
    _draw_panel(axes, compared, name, values)
  headline = next(iter(compared.averages))
  figure.supylabel(f"{compared.comparison.name}: {headline}", fontsize=_LABEL)
  handles, labels = panels[0].get_legend_handles_labels()
  label_width = _LETTER * max(map(len, labels)) + _HANDLE
  figure.legend(
    handles,
    labels,
    loc="outside lower center",
    ncols=max(1, int(width / label_width)),
    fontsize=_TICK,
  )
  return figure


def _draw_panel(
  axes: Axes, compared: PaperComparison, name: str, values: Sequence[Value]
) -> None:
  headline = next(iter(compared.averages))
  index = 0
  for column in compared.comparison.columns:
    keys = [Key(value.line, column.name, headline) for value in values]
    points = {
      value.value: compared.ours[key]
      for value, key in zip(values, keys, strict=True)
      if key in compared.ours
    }
    if not points:
      continue
    style = styled(column.name, [], index)
    index += 1
    scores = [number.score for number in points.values()]
    # A bootstrap interval need not hold the score.
    errors = [
      [max(number.score - number.interval[0], 0) for number in points.values()],
      [max(number.interval[1] - number.score, 0) for number in points.values()],
    ]
    axes.errorbar(
      list(points),
      scores,
      errors,
      fmt=style.marker,
      color=style.color,
      linestyle="-",
      linewidth=1.2,
      markersize=4.5,
      capsize=2,
      label=f"ours, {column.name}",
    )
  if compared.scale == "paper":
    for targets in compared.comparison.targets:
      index = _draw_printed(
        axes, targets.numbers, targets.model, headline, values, index
      )
  axes.set_xscale("symlog", base=2, linthresh=1)
  ticks = [value.value for value in values]
  axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45)
  axes.set_xticks([], minor=True)
  axes.set_ylim(-3, 103)
  axes.set_xlabel(name, fontsize=_LABEL)
  axes.tick_params(labelsize=_TICK)
  axes.spines[["top", "right"]].set_visible(False)


def _draw_printed(
  axes: Axes,
  numbers: Mapping[Key, float],
  model: str,
  headline: str,
  values: Sequence[Value],
  index: int,
) -> int:
  """Draws a model's printed numbers; returns the index of the next style."""
  for column in dict.fromkeys(key.column for key in numbers):
    points = [
      (value.value, numbers[key])
      for value in values
      if (key := Key(value.line, column, headline)) in numbers
    ]
    if points:
      style = styled(model, [], index)
      index += 1
      axes.plot(
        *zip(*points, strict=True),
        style.marker,
        color=style.color,
        linestyle="--",
        linewidth=0.9,
        markersize=4,
        label=f"{model}, {column}",
      )
  return index
