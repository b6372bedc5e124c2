"""Self-contained HTML pages."""

import base64
from collections.abc import Mapping

import jinja2

from kvjax.experiments.report import wording
from kvjax.experiments.report.excerpts import excerpts
from kvjax.experiments.report.means import Summary, means
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.report.tables import tables

_TEMPLATES = jinja2.Environment(
  loader=jinja2.PackageLoader("kvjax.experiments.report"),
  autoescape=True,
  undefined=jinja2.StrictUndefined,
  trim_blocks=True,
  lstrip_blocks=True,
)
_CAPTIONS = {
  "score_vs_retention": "Score against the share of keys and values",
  "score_vs_bytes": "Score against the bytes of a cache",
  "score_by_turn": "Score by turn of a conversation",
  "heatmap": "Share of {scored}, by length and depth",
}


def render(name: str, **values: object) -> str:
  """Renders a template of this package; all values are escaped."""
  return _TEMPLATES.get_template(f"{name}.html.jinja").render(values)


def of_run(record: Record, pictures: Mapping[str, bytes]) -> str:
  """Renders the page of a run: settings, tables, plots and some samples.

  Args:
    record: the run.
    pictures: contents of PNG files by name.
  """
  first, *others = tables(record)
  return render(
    "run",
    title=f"{record.summary['benchmark']}: {record.summary['model']}",
    headline=wording.headline(means(record.summary["rows"])),
    first=first,
    facts=facts(record.summary),
    tables=others,
    pictures=[
      (_caption(name, record), source(png), name.startswith("heatmap"))
      for name, png in pictures.items()
    ],
    excerpts=excerpts(record),
  )


def facts(summary: Summary) -> dict[str, str]:
  """Lists the settings that affect a run's numbers, by name."""
  seconds = summary["seconds"].items()
  return {
    "Model": f"{summary['model']} (weights {summary['weights']})",
    "Protocol": summary["protocol"],
    "Schedule": wording.keeping(summary),
    "Contexts": f"{wording.lengths(summary)} tokens",
    "Samples": f"{wording.samples(summary)} per task and length",
    "Seed": str(summary["seed"]),
    "Data": wording.data(summary),
    "Decoding": summary["decoding"],
    "Device": f"{summary['device']}, {summary['dtype']}",
    "Versions": wording.versions(summary["versions"]),
    "Seconds": ", ".join(f"{name} {value:.0f}" for name, value in seconds),
  }


def source(png: bytes) -> str:
  """Encodes a PNG as a data URL."""
  return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _caption(name: str, record: Record) -> str:
  """Describes a file such as `score_vs_bytes_1024.png`."""
  stem = name.removesuffix(".png")
  start = next(start for start in _CAPTIONS if stem.startswith(start))
  length = stem.removeprefix(start).removeprefix("_")
  caption = _CAPTIONS[start].format(scored=wording.scored(record.summary))
  return caption + (f", {length} tokens" if length else "")
