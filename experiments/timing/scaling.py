"""How time and memory grow with the length of a prompt."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from matplotlib.figure import Figure

from kvjax.experiments.report import figures, wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import progress_bar
from kvjax.experiments.timing import layer_compression
from kvjax.experiments.timing.layer_compression import Operation
from kvjax.model import Geometry

# The layer's attention to its own prompt, beside methods.
ATTENTION = "attention"


@dataclasses.dataclass(frozen=True)
class Scaled:
  """An operation at several lengths.

  Attributes:
    name: name of the method, or `ATTENTION`.
    seconds: median seconds, by length.
    temporary: bytes that it allocates besides its arrays, by length.
  """

  name: str
  seconds: Mapping[int, float]
  temporary: Mapping[int, int]


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
  operations: Mapping[str, Operation],
  heads: tuple[int, int, int],
  lengths: Sequence[int],
  rounds: int,
  dtype: str = "float32",
) -> list[Scaled]:
  """Times operations on a layer, which take turns at each length.

  Args:
    operations: what to time, by name.
    heads: query heads, KV heads and channels.
    lengths: tokens of the prompt.
    rounds: timings of each, after compilation.
    dtype: dtype of the activations.
  """
  seconds: dict[str, dict[int, float]] = {name: {} for name in operations}
  temporary: dict[str, dict[int, int]] = {name: {} for name in operations}
  steps = [(length, turn) for length in lengths for turn in range(rounds + 1)]
  taken: dict[str, list[float]] = {}
  for length, turn in progress_bar.track(steps, "timing"):
    geometry = Geometry.uniform(1, *heads, length)
    if turn == 0:
      taken = {name: [] for name in operations}
      activations = jax.block_until_ready(
        layer_compression.draw(geometry, length, dtype)
      )
    for name, operation in operations.items():
      if turn == 0:
        temporary[name][length] = operation.temporary_bytes(
          geometry, length, dtype
        )
      taken[name].append(operation.seconds(geometry, activations))
    if turn == rounds:
      for name, times in taken.items():
        # The first one compiles.
        seconds[name][length] = statistics.median(times[1:])
  return [Scaled(name, seconds[name], temporary[name]) for name in operations]


def table(results: Sequence[Scaled]) -> Table:
  """Builds the table, the fastest at the end first.

  If attention has been timed, a column relates the others to it.
  """
  lengths = sorted(results[0].seconds)
  longest = lengths[-1]
  attention = next((one for one in results if one.name == ATTENTION), None)

  def of_attention(one: Scaled) -> list[str]:
    if attention is None:
      return []
    share = one.seconds[longest] / attention.seconds[longest]
    return [f"{100 * share:,.1f}"]

  lines = [
    (
      one.name,
      *(wording.milliseconds(one.seconds[n], 1) for n in lengths),
      *of_attention(one),
      _exponent(one.seconds),
      f"{one.temporary[longest] / 2**20:,.1f}",
      _exponent(one.temporary),
    )
    for one in sorted(results, key=lambda one: one.seconds[longest])
  ]
  head = ["method", *(f"{n:,}" for n in lengths)]
  share = [] if attention is None else ["% of attention"]
  return Table("", [*head, *share, "exponent", "MiB", "exponent"], lines)


def _exponent(values: Mapping[int, float]) -> str:
  found = slope(values)
  return wording.NOTHING if math.isnan(found) else f"{found:z.2f}"


def picture(results: Sequence[Scaled]) -> Figure:
  """Draws time and temporary memory against length, on logarithmic axes."""
  figure = figures.canvas(8.0, 4.2)
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
      label=one.name,
    )
    axes[0].plot(lengths, [1e3 * one.seconds[n] for n in lengths], **style)
    # A logarithmic axis has no place for nothing.
    taken = [n for n in lengths if one.temporary[n]]
    axes[1].plot(taken, [one.temporary[n] / 2**20 for n in taken], **style)
  for axis, label in zip(axes, ("ms", "temporary MiB"), strict=True):
    axis.set_xscale("log")
    if any(line.get_xdata().size for line in axis.get_lines()):
      axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45)
    axis.minorticks_off()
    figures.finish(axis, "tokens", label, grid="both")
  figures.legend(figure, [*axes], columns=1, right=True)
  return figure
