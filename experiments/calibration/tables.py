"""Tables of calibration results."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.experiments.reporting import formats, wording
from kvjax.experiments.reporting.formats import Table

_Rows = Sequence[Mapping[str, Any]]


def tables(summary: Mapping[str, Any]) -> list[Table]:
  """Builds all tables: overview, measurements, results by task."""
  rows = summary["rows"]
  return [
    _overview(rows, summary["tau"]),
    _measured(rows, "measured", "NLL ratio by retention, mean over tasks"),
    _measured(rows, "tried", "NLL ratio by quality asked of the curve"),
    _by_task(rows, "retention", "retention reached (%)", 100, 1),
    _by_task(rows, "ratio", "NLL ratio", 1, 3),
  ]


def title(summary: Mapping[str, Any]) -> str:
  """Describes the run, as a title."""
  return (
    f"{summary['model']}, {summary['length']} tokens, calibrated on "
    f"{wording.count(summary['samples'], 'sample')} per task, applied at tau "
    f"{summary['tau']:g} to {wording.count(summary['held_out'], 'other')}"
  )


def circumstances(summary: Mapping[str, Any]) -> str:
  """Describes seed, heads, device and versions."""
  return (
    f"Seed {summary['seed']}, per {summary['heads']}, {summary['dtype']} on "
    f"{summary['device']}; {wording.versions(summary)}."
  )


def markdown(summary: Mapping[str, Any], plots: Sequence[str]) -> str:
  """Formats settings, tables and plots."""
  lines = [
    f"# {formats.escaped(title(summary))}",
    formats.escaped(circumstances(summary)),
    f"Data: {formats.escaped(wording.data(summary))}.",
    *(formats.to_markdown(table).rstrip() for table in tables(summary)),
    *(f"![{name}]({name})" for name in plots),
  ]
  return "\n\n".join(lines) + "\n"


def _overview(rows: _Rows, tau: float) -> Table:
  columns: dict[str, list[str]] = {}
  for row in rows:
    held_out = row["held_out"]
    line = {
      "method": row["method"],
      "alpha": _signed(row["alpha"]),
      "beta": _signed(row["beta"]),
      "error": f"{row['error']:.3f}",
      "triples": str(row["triples"]),
      "asked": wording.share(row["asked"]),
      "retention": wording.share(held_out["retention"]),
      "kept": wording.share(held_out["kept"]),
      "NLL ratio": f"{held_out['ratio']:.3f}",
    }
    for name, text in line.items():
      columns.setdefault(name, []).append(text)
  lines = list(zip(*columns.values(), strict=True))
  return Table(f"calibrations, and others at tau {tau:g}", [*columns], lines)


def _measured(rows: _Rows, field: str, title: str) -> Table:
  """Builds a table with a column per retention or quality."""
  names = list(rows[0][field])
  lines = [
    [row["method"], *(f"{row[field][name]:.3f}" for name in names)]
    for row in rows
  ]
  header = ["method", *(wording.share(float(name)) for name in names)]
  return Table(title, header, lines)


def _by_task(
  rows: _Rows, field: str, name: str, factor: float, digits: int
) -> Table:
  """Builds a table with a line per method and a column per task.

  The first line is the likelihood of the contexts.
  """
  tasks = list(rows[0]["tasks"])
  lines = [
    [
      "NLL of the context",
      *(f"{rows[0]['tasks'][t]['nll']:.2f}" for t in tasks),
    ]
  ]
  lines += [
    [
      row["method"],
      *(f"{factor * row['tasks'][task][field]:.{digits}f}" for task in tasks),
    ]
    for row in rows
  ]
  header = ["method", *(task.removeprefix("niah_") for task in tasks)]
  return Table(f"{name} by task, other samples", header, lines)


def _signed(value: float) -> str:
  return f"{value:+.3g}".replace("-", "−")
