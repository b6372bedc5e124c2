"""The plots of a run, as PNG files."""

import io
import re
from collections.abc import Mapping

from matplotlib.figure import Figure

from kvjax.experiments.report import score_plots
from kvjax.experiments.report.heatmaps import heatmaps
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.report.tables import has_depths, parts

_DPI = 200
_NAMES = re.compile(
  r"(score_vs_retention|score_vs_bytes|score_by_turn|heatmap)(_\d+)?\.png"
)


def pictures(record: Record) -> Mapping[str, bytes]:
  """Draws all plots; returns file contents by name."""
  run_parts = parts(record)
  figures: dict[str, Figure] = {}
  for part in run_parts:
    suffix = f"_{part.values('length')[0]}" if len(run_parts) > 1 else ""
    figures[f"score_vs_retention{suffix}"] = score_plots.score_vs_retention(
      part
    )
    figures[f"score_vs_bytes{suffix}"] = score_plots.score_vs_bytes(part)
    if None not in part.values("turn"):
      figures[f"score_by_turn{suffix}"] = score_plots.score_by_turn(part)
  if has_depths(record):
    figures["heatmap"] = heatmaps(record.summary)
  return {f"{name}.png": png(figure) for name, figure in figures.items()}


def is_picture(name: str) -> bool:
  """Returns whether `pictures` uses a file name."""
  return _NAMES.fullmatch(name) is not None


def png(figure: Figure, dpi: int = _DPI) -> bytes:
  """Encodes a figure as PNG."""
  content = io.BytesIO()
  figure.savefig(content, dpi=dpi, format="png")
  return content.getvalue()
