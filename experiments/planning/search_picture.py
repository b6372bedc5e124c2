"""The picture of a search: the largest batch against retention."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvjax.experiments.planning.batches import Batches
from kvjax.experiments.report import figures

# Retentions that are drawn.
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125, 0.09, 0.0625)
_TICKS = (1.0, 0.5, 0.25, 0.125, 0.0625)


def draw(title: str, batches: Mapping[str, Mapping[float, Batches]]) -> Figure:
  """Draws the largest batch of each slice, of decoding and of prefill.

  Args:
    title: what is planned.
    batches: for each slice, the largest batches by retention.
  """
  figure = figures.canvas(6, 4, title)
  axes = figure.subplots()
  for number, (name, by_share) in enumerate(batches.items()):
    shares, color = list(by_share), f"C{number}"
    decoded = [each.decode for each in by_share.values()]
    prefilled = [each.prefill for each in by_share.values()]
    axes.plot(shares, decoded, color, marker="o", label=f"{name}, decoding")
    axes.plot(
      shares, prefilled, color, linestyle="--", label=f"{name}, prefill"
    )
  axes.set_xscale("log", base=2)
  axes.set_xticks(_TICKS, [f"{100 * tick:g} %" for tick in _TICKS])
  axes.invert_xaxis()
  axes.set_ylim(bottom=0)
  axes.yaxis.set_major_locator(MaxNLocator(integer=True))
  figures.finish(axes, "retention", "largest batch", grid="both")
  axes.legend(fontsize=figures.LABEL)
  return figure
