"""A plot of scores by a quantity that candidates have."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvjax.experiments.papers.compare_to_paper import PaperComparison
from kvjax.experiments.papers.data_model import Key
from kvjax.experiments.report.lines import styled
from kvjax.experiments.run.candidates import FULL

_LABEL, _TICK = 9, 8
_GUIDE = "#BBBBBB"
_OURS = "ours"


def draw(compared: PaperComparison) -> Figure:
  """Plots the headline by the comparison's size, one series per model.

  The full cache is a level. The paper's numbers are shown at its own scale
  only, because the small one has other sizes.
  """
  size = compared.comparison.size
  assert size is not None
  name = next(iter(compared.averages))
  scores = {key: number.score for key, number in compared.ours.items()}
  series: dict[str, Mapping[Key, float]] = {_OURS: scores}
  if compared.scale == "paper":
    series |= {t.model: t.numbers for t in compared.comparison.targets}
  figure = Figure(figsize=(6.6, 4.0), layout="constrained")
  axes = figure.add_subplot()
  for index, (model, numbers) in enumerate(series.items()):
    _draw_series(axes, compared, model, _of(numbers, name), index)
  for guide in size.guides:
    axes.axvline(guide, color=_GUIDE, linewidth=0.8, zorder=0)
  ticks = sorted({*compared.sizes.values(), *size.guides})
  axes.set_xscale("log", base=2)
  axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
  axes.set_xticks([], minor=True)
  axes.set_ylim(-3, 103)
  axes.set_xlabel(size.name, fontsize=_LABEL)
  axes.set_ylabel(f"{compared.comparison.name}: {name}", fontsize=_LABEL)
  axes.tick_params(labelsize=_TICK)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(fontsize=_TICK)
  return figure


def _draw_series(
  axes: Axes,
  compared: PaperComparison,
  model: str,
  scores: Mapping[tuple[str, str], float],
  index: int,
) -> None:
  """Draws a model's points, each method with its own line, and its level."""
  full = {x.name for x in compared.comparison.lines if x.paper.method == FULL}
  style = styled(model, [], index)
  lines = dict.fromkeys(line for line, _ in compared.sizes)
  label: str | None = model
  for line in lines:
    points = sorted(
      (number, scores[place])
      for place, number in compared.sizes.items()
      if place[0] == line and place in scores
    )
    if not points:
      continue
    axes.plot(
      *zip(*points, strict=True),
      style.marker,
      color=style.color,
      linestyle="-",
      linewidth=0.8,
      markersize=4.5,
      label=label,
    )
    label = None
    axes.annotate(
      line, points[-1], xytext=(4, 2), textcoords="offset points", fontsize=7
    )
  level = next((scores[at] for at in scores if at[0] in full), None)
  if level is not None:
    axes.axhline(level, color=style.color, linestyle="-.", linewidth=0.8)


def _of(
  numbers: Mapping[Key, float], name: str
) -> dict[tuple[str, str], float]:
  """Selects the numbers of an average by line and column."""
  return {
    (key.line, key.column): number
    for key, number in numbers.items()
    if key.what == name
  }
