"""The rows of a run with all that identifies them, for other programs."""

from collections.abc import Mapping
from typing import Any

from kvjax.experiments.candidates import FULL
from kvjax.experiments.reporting import wording
from kvjax.experiments.reporting.means import Row, Summary, grouped
from kvjax.experiments.reporting.records import Record

# Of a summary: what rows must share to be compared.
SETTINGS = (
  "benchmark",
  "model",
  "weights",
  "dtype",
  "seed",
  "python",
  "protocol",
  "schedule",
  "heads",
  "kv_dtype",
  "data",
  "decoding",
)
_PLACE = ("task", "length", "depth", "turn")
_COUNTS = (
  "context_tokens",
  "kept_tokens",
  "read_tokens",
  "cache_bytes",
  "host_bytes",
)


def identified(record: Record) -> list[dict[str, Any]]:
  """One line per row, the full cache first.

  `compression_ratio` is the share of the context that was removed, `delta` the
  score less the full cache's on the same samples.
  """
  groups = grouped(record.summary["rows"])
  full = {
    _place(row): row["score"]
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
  """The settings of a run by their names."""
  return {name: summary[name] for name in SETTINGS}


def _place(row: Row) -> tuple[object, ...]:
  return tuple(row[name] for name in _PLACE)


def _fields(
  row: Row, full: Mapping[tuple[object, ...], float]
) -> dict[str, Any]:
  low, high = row["interval"]
  yardstick = full.get(_place(row))
  return {
    **{name: row[name] for name in ("method", "options", "budget")},
    "retention": row["retention"],
    "compression_ratio": round(
      1 - row["kept_tokens"] / row["context_tokens"], 4
    ),
    **{name: row[name] for name in _PLACE},
    "score": row["score"],
    "interval_low": low,
    "interval_high": high,
    "delta": None if yardstick is None else round(row["score"] - yardstick, 2),
    **row["scores"],
    "samples": row["samples"],
    **{name: row[name] for name in _COUNTS},
  }
