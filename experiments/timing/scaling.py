"""How time and memory of a method grow with the length of a prompt."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import kvjax
from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import progress_bar
from kvjax.experiments.timing import layer_compression
from kvjax.model import Geometry

# Of the picture, in inches and points.
_SIZE, _FONT = (8.0, 4.2), 7


@dataclasses.dataclass(frozen=True)
class Scaled:
  """A method at several lengths.

  Attributes:
    method: name of the method.
    seconds: median seconds of scoring and compaction, by length.
    temporary: bytes that scoring allocates besides its arrays, by length.
  """

  method: str
  seconds: Mapping[int, float]
  temporary: Mapping[int, int]

  @property
  def time_slope(self) -> float:
    """Exponent of time in the length."""
    return slope(self.seconds)

  @property
  def memory_slope(self) -> float:
    """Exponent of memory in the length."""
    return slope(self.temporary)


def slope(values: Mapping[int, float]) -> float:
  """Least squares of log(value) on log(length), over the longer half.

  Short lengths, where fixed costs dominate, are left out. NaN if a value is 0.
  """
  lengths = sorted(values)
  longer = lengths[min(len(lengths) // 2, len(lengths) - 2) :]
  if not all(values[n] for n in longer):
    return math.nan
  of_lengths = np.log([float(values[n]) for n in longer])
  return float(np.polyfit(np.log(longer), of_lengths, 1)[0])


def measure(
  plans: Mapping[str, kvjax.Plan],
  heads: tuple[int, int, int],
  lengths: Sequence[int],
  rounds: int,
) -> list[Scaled]:
  """Times a layer by every method, which take turns at each length.

  Args:
    plans: plans for whole prompts by the names of their methods.
    heads: query heads, KV heads and channels.
    lengths: tokens of the prompt.
    rounds: timings of each, after compilation.
  """
  seconds: dict[str, dict[int, float]] = {name: {} for name in plans}
  temporary: dict[str, dict[int, int]] = {name: {} for name in plans}
  steps = [(length, turn) for length in lengths for turn in range(rounds + 1)]
  taken: dict[str, list[float]] = {}
  for length, turn in progress_bar.track(steps, "timing"):
    geometry = Geometry.uniform(1, *heads, length)
    if turn == 0:
      taken = {name: [] for name in plans}
      activations = jax.block_until_ready(
        layer_compression.draw(geometry, length)
      )
    for name, plan in plans.items():
      if turn == 0:
        temporary[name][length] = layer_compression.temporary_bytes(
          plan, geometry, length
        )
      taken[name].append(layer_compression.seconds(plan, geometry, activations))
    if turn == rounds:
      for name, times in taken.items():
        # The first one compiles.
        seconds[name][length] = statistics.median(times[1:])
  return [Scaled(name, seconds[name], temporary[name]) for name in plans]


def table(results: Sequence[Scaled]) -> Table:
  """Builds the table, the fastest at the end first."""
  lengths = sorted(results[0].seconds)
  lines = [
    (
      one.method,
      *(f"{1e3 * one.seconds[n]:,.1f}" for n in lengths),
      _exponent(one.time_slope),
      f"{one.temporary[lengths[-1]] / 2**20:,.1f}",
      _exponent(one.memory_slope),
    )
    for one in sorted(results, key=lambda one: one.seconds[lengths[-1]])
  ]
  names = (f"{n:,}" for n in lengths)
  return Table("", ["method", *names, "exponent", "MiB", "exponent"], lines)


def _exponent(slope: float) -> str:
  return wording.NOTHING if math.isnan(slope) else f"{slope:z.2f}"


def picture(results: Sequence[Scaled]) -> Figure:
  """Draws time and temporary memory against length, on logarithmic axes."""
  figure = Figure(figsize=_SIZE, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots(1, 2)
  # Color-blind safe colors alternate with markers and dashes.
  markers, dashes = "osD^vPX*", ("-", "--", ":")
  lengths = sorted(results[0].seconds)
  for number, one in enumerate(results):
    style = dict(
      marker=markers[number % len(markers)],
      linestyle=dashes[number // len(markers) % len(dashes)],
      color=f"C{number % 10}",
      markersize=3,
      linewidth=1,
      label=one.method,
    )
    axes[0].plot(lengths, [1e3 * one.seconds[n] for n in lengths], **style)
    # A logarithmic axis has no place for nothing.
    taken = [n for n in lengths if one.temporary[n]]
    axes[1].plot(taken, [one.temporary[n] / 2**20 for n in taken], **style)
  for axis, label in zip(axes, ("ms", "temporary MiB"), strict=True):
    axis.set(xscale="log", xlabel="tokens", ylabel=label)
    if any(line.get_xdata().size for line in axis.get_lines()):
      axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside right center", fontsize=_FONT, frameon=False
  )
  return figure
