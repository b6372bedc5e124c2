"""Plots of score against cost, one line per method."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from kvjax.experiments.report import lines, wording
from kvjax.experiments.report.lines import Line
from kvjax.experiments.report.means import (
  Mean,
  Summary,
  complete,
  means,
  reads_less,
)
from kvjax.experiments.run.candidates import FULL

# Lines are shifted sideways so that points do not overlap: the shift of the
# natural logarithm of the cost between two lines, and its maximum in total.
_SHIFT, _SHIFTS = 0.022, 0.16
# Minimum distance of two ticks, as a share of the axis.
_TICKS = 0.09
# Font size of the title in points, and its letters per inch.
_TITLE, _LETTERS = 9, 15


def score_vs_retention(summary: Summary) -> Figure:
  """Plots the mean score over the tasks; retention decreases to the right.

  The position of a point is the share that the method actually keeps, or reads,
  since some methods keep more or less than their budget.
  """
  averages = complete(means(summary["rows"]))
  kept = "read per token" if reads_less(averages) else "kept"
  fixed = [mean for mean in averages if not mean.automatic]
  named = fixed if any(mean.method != FULL for mean in fixed) else averages
  return _draw(
    summary,
    _lines(averages, lambda mean: mean.read_tokens / mean.context_tokens),
    f"keys and values {kept}",
    {mean.retention: wording.share(mean.retention) for mean in named},
  )


def score_vs_bytes(summary: Summary) -> Figure:
  """Plots the mean score over the tasks; cache bytes decrease to the right.

  All allocated bytes count, including those in host memory.
  """
  averages = means(summary["rows"])
  sizes = [mean.cache_bytes for mean in averages]
  unit, size = wording.unit(sizes)
  low, high = (math.log2(bound) for bound in (min(sizes), max(sizes)))
  powers = range(math.floor(low), math.ceil(high) + 1)
  return _draw(
    summary,
    _lines(averages, lambda mean: mean.cache_bytes),
    f"cache per sample ({unit})",
    {2.0**power: f"{2.0**power / size:g}" for power in powers},
  )


def score_by_turn(summary: Summary) -> Figure:
  """Plots the score of every turn of a conversation, for each budget."""
  rows = summary["rows"]
  turns = sorted({row["turn"] for row in rows})
  averages = {
    turn: means(r for r in rows if r["turn"] == turn) for turn in turns
  }
  every = means(rows)
  methods = _methods(every)
  budgets = list(dict.fromkeys(m.budget for m in every if m.method != FULL))
  pictures = {}
  for budget in budgets or ["1"]:
    points: dict[str, list[tuple[float, float]]] = {}
    for turn in turns:
      for mean in averages[turn]:
        if mean.method == FULL or mean.budget == budget:
          place = (float(turn + 1), mean.score)
          points.setdefault(mean.method, []).append(place)
    pictures[budget] = [
      Line("full cache", places)
      if method == FULL
      else lines.styled(method, places, methods.index(method))
      for method, places in points.items()
    ]
  sizes = [lines.size(drawn) for drawn in pictures.values()]
  figure = _figure(
    summary,
    max(width for width, _ in sizes),
    sum(height for _, height in sizes),
  )
  several = figure.subplots(len(pictures), squeeze=False)[:, 0]
  for axes, (budget, drawn) in zip(several, pictures.items(), strict=True):
    axes.set_title(wording.budget("", budget), fontsize=_TITLE, loc="left")
    axes.set_xlabel("turn")
    axes.xaxis.set_major_locator(FixedLocator([turn + 1 for turn in turns]))
    _draw_lines(axes, drawn, wording.score_axis(summary))
  return figure


def _lines(
  averages: Sequence[Mean], cost: Callable[[Mean], float]
) -> list[Line]:
  """Builds a line per method, which starts at the full cache, and its level."""
  full = [(cost(m), m.score) for m in averages if m.method == FULL]
  most = full[0][0] if full else math.inf
  methods = _methods(averages)
  step = min(_SHIFT, _SHIFTS / max(len(methods), 1))
  drawn = []
  for index, method in enumerate(methods):
    shift = math.exp(-step * (index - (len(methods) - 1) / 2))
    points = [(cost(m), m.score) for m in averages if m.method == method]
    points.sort(key=lambda place: -place[0])
    places = [(x * shift if x < most else x, score) for x, score in points]
    drawn.append(lines.styled(method, [*full, *places], index, len(full)))
  return [*drawn, *(Line("full cache", [place], level=True) for place in full)]


def _methods(averages: Sequence[Mean]) -> list[str]:
  return list(dict.fromkeys(m.method for m in averages if m.method != FULL))


def _draw(
  summary: Summary,
  drawn: Sequence[Line],
  label: str,
  ticks: Mapping[float, str],
) -> Figure:
  """Plots lines over a logarithmic axis that decreases to the right."""
  figure = _figure(summary, *lines.size(drawn))
  axes = figure.add_subplot()
  axes.set_xscale("log")
  least, most = min(ticks), max(ticks)
  reached = [x for line in drawn for x, _ in line.places]
  axes.set_xlim(
    max(most * 1.1, *reached),
    min(least / 1.1, *reached),
  )
  shown = _apart(sorted(ticks), _TICKS * math.log(1.21 * most / least))
  axes.xaxis.set_major_locator(FixedLocator(shown))
  axes.xaxis.set_major_formatter(FixedFormatter([ticks[x] for x in shown]))
  axes.xaxis.set_minor_locator(NullLocator())
  axes.set_xlabel(label)
  _draw_lines(axes, drawn, wording.score_axis(summary))
  return figure


def _draw_lines(axes: Axes, drawn: Sequence[Line], label: str) -> None:
  axes.set_ylim(-3, 103)
  axes.set_yticks(range(0, 101, 20))
  axes.set_ylabel(label)
  axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)
  lines.draw(axes, drawn)
  lines.draw_labels(axes, drawn)


def _apart(ticks: Sequence[float], gap: float) -> list[float]:
  """Selects ticks whose labels do not touch, including the last one."""
  shown = [ticks[-1]]
  for tick in ticks[-2::-1]:
    if math.log(shown[-1] / tick) > gap:
      shown.append(tick)
  return shown


def _figure(summary: Summary, width: float, height: float) -> Figure:
  """Creates a figure with a wrapped title, without pyplot's global state."""
  figure = Figure(figsize=(width, height), layout="constrained")
  FigureCanvasAgg(figure)
  heading = textwrap.fill(wording.title(summary), int(width * _LETTERS))
  figure.suptitle(heading, fontsize=_TITLE, x=0.02, ha="left", parse_math=False)
  return figure
