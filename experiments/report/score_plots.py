"""Plots of score against cost, one line per method."""

import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from kvjax.experiments.report import figures, lines, wording
from kvjax.experiments.report.lines import Line, Point
from kvjax.experiments.report.means import (
  Mean,
  Name,
  complete,
  means,
  ranked,
  reads_less,
)
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.report.tables import budget_names
from kvjax.experiments.run.candidates import FULL

# More methods than this cannot be told apart: the best keep their colors, and
# the baseline that all must beat.
_MOST, _BASELINE = 12, "random"
# Minimum distance of two ticks, as a share of the axis.
_TICKS = 0.09
# Ends of axes of scores.
_TOPS = (20, 30, 40, 50, 60, 80, 100)


def score_vs_retention(record: Record) -> Figure:
  """Plots the mean score over the tasks; retention decreases to the right.

  The position of a point is the share that the method actually keeps, or reads,
  since some methods keep more or less than their budget. Vertical bars are the
  95 % intervals of the scores.
  """
  summary = record.summary
  averages = means(summary["rows"], record.answers)
  return means_vs_retention(
    averages, wording.title(summary), wording.score_axis(summary)
  )


def means_vs_retention(
  averages: Sequence[Mean], title: str, axis: str
) -> Figure:
  """Plots means as `score_vs_retention` does.

  Args:
    averages: the means; those that `complete` drops are left out.
    title: title of the plot.
    axis: label of the scores' axis.
  """
  averages = complete(averages)
  kept = "read per token" if reads_less(averages) else "kept"
  fixed = [mean for mean in averages if not mean.automatic]
  named = fixed if any(mean.method != FULL for mean in fixed) else averages
  return _draw(
    _lines(averages, lambda mean: mean.read_tokens / mean.context_tokens),
    {mean.retention: wording.share(mean.retention) for mean in named},
    title,
    f"keys and values {kept}",
    axis,
  )


def score_vs_bytes(record: Record) -> Figure:
  """Plots the mean score over the tasks; cache bytes decrease to the right.

  All allocated bytes count, including those in host memory. Methods that
  answered other tasks than most are left out.
  """
  summary = record.summary
  averages = complete(means(summary["rows"], record.answers))
  sizes = [mean.cache_bytes for mean in averages]
  unit, size = wording.unit(sizes)
  low, high = (math.log2(bound) for bound in (min(sizes), max(sizes)))
  powers = range(math.floor(low), math.ceil(high) + 1)
  return _draw(
    _lines(averages, lambda mean: mean.cache_bytes),
    {2.0**power: f"{2.0**power / size:g}" for power in powers},
    wording.title(summary),
    f"cache per sample ({unit})",
    wording.score_axis(summary),
  )


def score_by_turn(record: Record) -> Figure:
  """Plots the score of every turn of a conversation, for each budget."""
  turns = sorted(record.values("turn"))
  points: dict[Name, list[Point]] = {}
  for turn in turns:
    part = record.at(turn=turn)
    for mean in means(part.summary["rows"], part.answers):
      point = Point(float(turn + 1), mean.score, mean.interval)
      points.setdefault(mean.name, []).append(point)
  methods = _methods(means(record.summary["rows"]))
  pictures = {
    budget: [
      Line("full cache", own)
      if method == FULL
      else lines.styled(method, own, methods.index(method))
      for (method, of), own in points.items()
      if method == FULL or of == budget
    ]
    for budget in budget_names(record)
  }
  sizes = [lines.size(drawn) for drawn in pictures.values()]
  figure = figures.canvas(
    max(width for width, _ in sizes),
    sum(height for _, height in sizes),
    wording.title(record.summary),
  )
  several = figure.subplots(len(pictures), squeeze=False)[:, 0]
  for axes, (budget, drawn) in zip(several, pictures.items(), strict=True):
    axes.xaxis.set_major_locator(FixedLocator([turn + 1 for turn in turns]))
    labels = f"turn{_explained(drawn)}", wording.score_axis(record.summary)
    figures.finish(axes, *labels, wording.budget("", budget), grid="y")
    _draw_lines(axes, drawn)
  return figure


def _lines(
  averages: Sequence[Mean], cost: Callable[[Mean], float]
) -> list[Line]:
  """Builds a line per method, which starts at the full cache, and its level."""

  def points(method: str) -> list[Point]:
    own = [mean for mean in averages if mean.method == method]
    own.sort(key=lambda mean: -cost(mean))
    return [Point(cost(mean), mean.score, mean.interval) for mean in own]

  full, named = points(FULL), _named(averages)
  drawn = [
    lines.styled(method, [*full, *points(method)], index, len(full))
    for index, method in enumerate(named)
  ]
  others = [
    Line("", [*full, *points(method)])
    for method in _methods(averages)
    if method not in named
  ]
  level = [Line("full cache", [point], level=True) for point in full]
  return [*others, *drawn, *level]


def _named(averages: Sequence[Mean]) -> list[str]:
  """The methods that have colors and labels."""
  methods = _methods(averages)
  if len(methods) <= _MOST:
    return methods
  baseline = [method for method in methods if method == _BASELINE]
  best = [
    method for method in _methods(ranked(averages)) if method != _BASELINE
  ]
  return [*best[: _MOST - len(baseline)], *baseline]


def _methods(averages: Sequence[Mean]) -> list[str]:
  return list(dict.fromkeys(m.method for m in averages if m.method != FULL))


def _draw(
  drawn: Sequence[Line],
  ticks: Mapping[float, str],
  title: str,
  cost: str,
  score: str,
) -> Figure:
  """Plots lines over a logarithmic axis that decreases to the right."""
  figure = figures.canvas(*lines.size(drawn), title)
  axes = figure.add_subplot()
  axes.set_xscale("log")
  least, most = min(ticks), max(ticks)
  reached = [point.x for line in drawn for point in line.points]
  axes.set_xlim(max(most * 1.1, *reached), min(least / 1.1, *reached))
  shown = _apart(sorted(ticks), _TICKS * math.log(1.21 * most / least))
  axes.xaxis.set_major_locator(FixedLocator(shown))
  axes.xaxis.set_major_formatter(FixedFormatter([ticks[x] for x in shown]))
  axes.xaxis.set_minor_locator(NullLocator())
  figures.finish(axes, f"{cost}{_explained(drawn)}", score, grid="y")
  _draw_lines(axes, drawn, _top(drawn))
  return figure


def _top(drawn: Sequence[Line]) -> int:
  """The lowest of `_TOPS` that no point or bar is above."""
  highest = max(
    max((point.score, *(point.interval or ())))
    for line in drawn
    for point in line.points
  )
  return next((top for top in _TOPS if highest <= top), 100)


def _draw_lines(axes: Axes, drawn: Sequence[Line], top: int = 100) -> None:
  axes.set_ylim(*lines.heights(top))
  axes.set_yticks(range(0, top + 1, 20 if top > 60 else 10))
  lines.draw(axes, drawn)
  lines.draw_labels(axes, drawn)


def _explained(drawn: Sequence[Line]) -> str:
  """Explains bars and lines without names, if there are any."""
  points = (point for line in drawn for point in line.points)
  is_known = any(point.interval is not None for point in points)
  said = "; bars, side by side, are 95 % intervals" if is_known else ""
  others = sum(not line.name for line in drawn)
  named = wording.count(others, "other method")
  return f"{said};\ngray: {named}" if others else said


def _apart(ticks: Sequence[float], gap: float) -> list[float]:
  """Selects ticks whose labels do not touch, including the last one."""
  shown = [ticks[-1]]
  for tick in ticks[-2::-1]:
    if math.log(shown[-1] / tick) > gap:
      shown.append(tick)
  return shown
