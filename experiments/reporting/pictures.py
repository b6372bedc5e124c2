"""The plots of a run, as PNG files."""

import io
import re
from collections.abc import Mapping

from matplotlib.figure import Figure

from kvjax.experiments.reporting import curves
from kvjax.experiments.reporting.heatmaps import heatmaps
from kvjax.experiments.reporting.records import Record
from kvjax.experiments.reporting.tables import has_depths, parts

_DPI = 200
_NAMES = re.compile(
  r"(score_vs_retention|score_vs_bytes|score_by_turn|heatmap)(_\d+)?\.png"
)


def pictures(record: Record) -> Mapping[str, bytes]:
  """The content of all files by their names."""
  own = parts(record)
  figures: dict[str, Figure] = {}
  for part in own:
    end = f"_{part.values('length')[0]}" if len(own) > 1 else ""
    figures[f"score_vs_retention{end}"] = curves.score_vs_retention(
      part.summary
    )
    figures[f"score_vs_bytes{end}"] = curves.score_vs_bytes(part.summary)
    if None not in part.values("turn"):
      figures[f"score_by_turn{end}"] = curves.score_by_turn(part.summary)
  if has_depths(record):
    figures["heatmap"] = heatmaps(record.summary)
  return {f"{name}.png": png(figure) for name, figure in figures.items()}


def is_picture(name: str) -> bool:
  """Whether `pictures` may have named a file so."""
  return _NAMES.fullmatch(name) is not None


def png(figure: Figure) -> bytes:
  """A figure as a file holds it."""
  content = io.BytesIO()
  figure.savefig(content, dpi=_DPI, format="png")
  return content.getvalue()
