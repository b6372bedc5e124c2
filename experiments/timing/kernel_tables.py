"""Selects the kernels to time and formats the results."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvjax.experiments import refusals
from kvjax.experiments.report import benchmark_tables, wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.timing.kernel_timing import XLA, Bandwidth, Timed
from kvjax.kernels.specs import Spec

HEADING = (
  "operation",
  "program",
  "ms",
  "GB/s",
  "% of bandwidth",
  f"× {XLA}",
  "difference",
)


def chosen[T](
  specs: Sequence[tuple[str, T]], only: Sequence[str]
) -> list[tuple[str, T]]:
  """Selects what there is of some operations, by their names.

  Raises:
    InputError: an operation is unknown, or there are no names.
  """
  refusals.refuse_unknown(
    "only", only, dict.fromkeys(name for name, _ in specs)
  )
  return [(name, spec) for name, spec in specs if name in only]


def rows(
  operation: str, spec: Spec, bandwidth: Bandwidth, timed: Sequence[Timed]
) -> Iterator[dict[str, Any]]:
  """Yields the rows of summary.json for a specification, one per program."""
  by_xla = next(one.bytes_per_second for one in timed if one.program == XLA)
  for one in timed:
    row: dict[str, Any] = {
      "operation": operation,
      "shapes": spec.name,
      "program": one.program,
      "seconds": one.seconds,
      "ideal_bytes": one.ideal_bytes,
      "bandwidth": bandwidth.bytes_per_second,
    }
    speed = one.bytes_per_second
    if speed is not None and by_xla is not None:
      row |= {
        "bytes_per_second": speed,
        "share_of_bandwidth": speed / bandwidth.bytes_per_second,
        "xla_over_this": speed / by_xla,
        "difference": one.difference,
      }
    yield row


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Builds the table of rows of summary.json."""
  return Table("", HEADING, [_cells(row) for row in rows])


def about(summary: Mapping[str, Any]) -> str:
  """Says in the words of summary.json how its rows were measured."""
  speeds = [row["bandwidth"] for row in summary["rows"]]
  return (
    f"Median of {wording.count(summary['rounds'], 'round')}, seed "
    f"{summary['seed']}, on {summary['device']}; "
    f"{summary['read_bytes'] >> 20} MiB were read at "
    f"{benchmark_tables.speeds(speeds)} in turns with them"
  )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
  head = f"{row['operation']}, {row['shapes']}", row["program"]
  if row["seconds"] is None:
    return *head, "declines", *[wording.NOTHING] * (len(HEADING) - 3)
  return (
    *head,
    f"{1e3 * statistics.median(row['seconds']):,.3f}",
    f"{row['bytes_per_second'] / 1e9:,.2f}",
    f"{100 * row['share_of_bandwidth']:.1f}",
    f"{row['xla_over_this']:.2f}",
    f"{row['difference']:.1g}",
  )
