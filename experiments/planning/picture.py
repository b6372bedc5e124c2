"""The picture of a search: the largest batch against retention."""

from collections.abc import Mapping

from matplotlib.figure import Figure

# Retentions that are drawn.
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125, 0.09, 0.0625)


def draw(title: str, batches: Mapping[str, Mapping[float, int]]) -> Figure:
  """Draws the largest batch of each slice.

  Args:
    title: what is planned.
    batches: for each slice, the largest batch by retention.
  """
  figure = Figure(figsize=(6, 4), layout="constrained")
  axes = figure.subplots()
  for name, by_share in batches.items():
    axes.plot(list(by_share), list(by_share.values()), marker="o", label=name)
  axes.set_xscale("log", base=2)
  axes.set_yscale("log", base=2)
  ticks = [1.0, 0.5, 0.25, 0.125, 0.0625]
  axes.set_xticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
  axes.invert_xaxis()
  axes.yaxis.set_major_formatter("{x:g}")
  axes.set_xlabel("retention")
  axes.set_ylabel("largest batch")
  axes.set_title(title, fontsize="small", wrap=True)
  axes.grid(alpha=0.3)
  if batches:
    axes.legend()
  return figure
