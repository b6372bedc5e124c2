"""Plots of quality against retention, and of retentions by method."""

import statistics
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import kvjax
from kvjax.calibration.curve import quality
from kvjax.calibration.shape import shaped
from kvjax.experiments.calibration.fits import RECITE, Fitted, features
from kvjax.experiments.calibration.measuring import Measurement
from kvjax.experiments.report import figures, formats
from kvjax.experiments.report.lines import Point, styled

_COLUMNS = 4
_PANEL = (2.7, 2.3)
_BAR = "#8FB3D9"


def ratio_curves(fitted: Sequence[Fitted], title: str) -> Figure:
  """Plots quality against retention: a panel per method, a color per task.

  Points are means over samples; the line is the fitted curve of the task's mean
  kc or, by rule "recite", the mean of what is recited. After Figure 6 of Chari
  and Van Durme.
  """
  columns = min(_COLUMNS, len(fitted))
  rows = -(-len(fitted) // columns)
  size = (max(columns * _PANEL[0], 6), rows * _PANEL[1] + 1.1)
  figure = figures.canvas(*size, title)
  drawn = figures.panels(figure, len(fitted), columns)
  for axes, method in zip(drawn, fitted, strict=True):
    _draw_curves(axes, method)
  figures.label_sides(figure, y="remaining quality")
  figures.legend(figure, drawn)
  return figure


def retention_bars(fitted: Sequence[Fitted], tau: float, title: str) -> Figure:
  """Plots the retention of each method, overall and by task.

  After Figure 7 of Chari and Van Durme.
  """
  height = 0.34 * len(fitted) + 1.7
  figure = figures.canvas(7.5, height, title)
  axes = figure.add_subplot()
  reached = [method.reached_at(tau) for method in fitted]
  tasks = _tasks(reached[0])
  for place, of_method in enumerate(reached):
    mean = _percent(of_method)
    axes.barh(place, mean, color=_BAR, height=0.7)
    axes.text(101, place, f"{mean:.1f} %", fontsize=figures.TITLE, va="center")
  for index, task in enumerate(tasks):
    style = styled(task, [], index)
    means = [
      _percent([m for m in of_method if m.task == task])
      for of_method in reached
    ]
    axes.plot(
      means,
      range(len(fitted)),
      style.marker,
      color=style.color,
      markersize=4,
      label=task.removeprefix("niah_"),
    )
  axes.set_yticks(range(len(fitted)), [method.name for method in fitted])
  axes.invert_yaxis()
  axes.set_xlim(0, 112)
  axes.set_xticks(range(0, 101, 20))
  figures.finish(axes, f"mean retention reached at tau {tau:g} (%)", grid="x")
  figures.legend(figure, [axes])
  return figure


def _draw_curves(axes: Axes, method: Fitted) -> None:
  line = method.calibration
  for index, task in enumerate(_tasks(method.sets.triples)):
    of_task = [m for m in method.sets.triples if m.task == task]
    places = method.mean_ratios(of_task)
    style = styled(task, [Point(*place) for place in places], index)
    axes.plot(*_predicted(line, of_task), color=style.color, linewidth=1)
    axes.plot(
      *zip(*places, strict=True),
      style.marker,
      color=style.color,
      markersize=4,
      label=task.removeprefix("niah_"),
    )
  axes.set_xlim(0, 1.02)
  axes.set_ylim(-0.03, 1.2)
  name = formats.at_options(method.name, 28)
  figures.finish(axes, "retention", title=name, grid="both")


def _predicted(
  line: kvjax.Calibration, of_task: Sequence[Measurement]
) -> tuple[Float[np.ndarray, " R"], Float[np.ndarray, " R"]]:
  """Returns retentions, and the quality there that a rule expects of a task."""
  if line.preset == RECITE:
    recited = [
      [m.recited for m in of_task if m.retention == share]
      for share in line.grid
    ]
    return np.array(line.grid), np.mean(np.array(recited, np.float64), axis=1)
  shares = np.linspace(0.0, 1.0, 101, dtype=np.float32)
  kc = np.float32(np.mean(line.curvature(features(of_task))))
  shape = tuple(zip(line.grid, line.shape, strict=True)) if line.shape else ()
  bent = jnp.asarray(shaped(shares, shape), jnp.float32)
  return shares, np.asarray(quality(bent, jnp.full(shares.shape, kc)))


def _tasks(measurements: Sequence[Measurement]) -> list[str]:
  return list(dict.fromkeys(m.task for m in measurements))


def _percent(measurements: Sequence[Measurement]) -> float:
  return 100 * statistics.fmean(m.retention for m in measurements)
