"""The rows of a run with all identifying settings, for other programs."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvjax.experiments.report import wording
from kvjax.experiments.report.means import (
  PLACE,
  TIMED,
  Place,
  Row,
  Summary,
  evictable,
  grouped,
  place,
)
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.run.candidates import FULL
from kvjax.experiments.run.results import Settings

# Fields of a summary that comparable rows share.
SETTINGS = (
  "benchmark",
  *(f.name for f in fields(Settings) if f.name not in ("benchmark", "data")),
  *("data", "decoding"),
)


def identified(record: Record) -> list[dict[str, Any]]:
  """Builds one record per row, the full cache first.

  `compression_ratio` is the share of the context that was evicted, of layers
  without a window if others have one (`global_tokens`), `delta` the
  difference from the full cache's score on the same samples.
  """
  groups = grouped(record.summary["rows"])
  full = {
    place(row): row["score"]
    for row in record.summary["rows"]
    if row["method"] == FULL
  }
  settings = settings_of(record.summary) | {
    "data": wording.data(record.summary)
  }
  return [
    settings | _fields(row, full) for rows in groups.values() for row in rows
  ]


def settings_of(summary: Summary) -> dict[str, Any]:
  """Returns the settings of a run by name."""
  return {name: summary[name] for name in SETTINGS}


def _fields(row: Row, full: Mapping[Place, float]) -> dict[str, Any]:
  low, high = row["interval"]
  baseline = full.get(place(row))
  return {
    **{name: row[name] for name in ("method", "options", "budget")},
    "retention": row["retention"],
    "compression_ratio": round(1 - evictable(row) / row["context_tokens"], 4),
    **{name: row[name] for name in PLACE},
    "score": row["score"],
    "interval_low": low,
    "interval_high": high,
    "delta": None if baseline is None else round(row["score"] - baseline, 2),
    **row["scores"],
    "samples": row["samples"],
    **{name: row[name] for name in TIMED if name in row},
  }
