"""Tables of calibration results."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.experiments.report import formats, wording
from kvjax.experiments.report.formats import Table

_Rows = Sequence[Mapping[str, Any]]

# Where all contexts have nearly the same quality, R2 has no bound below.
_LEAST_R2 = -10

# How each rule chooses a retention.
_RULES = {
  "prefill": "The retention is the least measured one at which the curve of "
  "kc, which bends the mean quality, reaches the target.",
  "paper": "The retention is that at which the curve of kc reaches tau.",
  "recite": "The retention is the least measured one from which on all caches "
  "recite the context with the quality of the target. Tokens that are often in "
  "answers count more.",
}
# Said before the command that compares scores.
TRIALS = "Whether scores of tasks stay equal over seeds, within 5 points:"


def tables(summary: Mapping[str, Any]) -> list[Table]:
  """Builds all tables: overview, measurements, results by task."""
  rows = summary["rows"]
  return [
    _overview(rows, summary["tau"]),
    _measured(rows),
    _rules(rows),
    _by_task(rows, "kept", "kept (%)", 100, 1),
    _by_task(rows, "needed", "least needed (%)", 100, 1),
    _by_task(rows, "ratio", "quality", 1, 3),
  ]


def title(summary: Mapping[str, Any]) -> str:
  """Describes the run, as a title."""
  lengths = " and ".join(map(str, summary["length"]))
  return (
    f"{summary['model']}, {lengths} tokens, rule {summary['rule']}, calibrated "
    "on "
    f"{wording.count(summary['samples'], 'sample')} per task, applied at tau "
    f"{summary['tau']:g} to {wording.count(summary['held_out'], 'other')}"
  )


def circumstances(summary: Mapping[str, Any]) -> str:
  """Describes seed, heads, device and versions."""
  return (
    f"Seed {summary['seed']}, per {summary['heads']}, {summary['dtype']} on "
    f"{summary['device']}; {wording.versions(summary['versions'])}."
  )


def markdown(summary: Mapping[str, Any], plots: Sequence[str]) -> str:
  """Formats settings, tables and plots."""
  return formats.document(
    f"# {formats.escaped(title(summary))}",
    formats.escaped(circumstances(summary)),
    f"Data: {formats.escaped(wording.data(summary))}.",
    _RULES[summary["rule"]],
    *tables(summary),
    *(f"![{name}]({name})" for name in plots),
    TRIALS,
    f"    {summary['trials']}",
  )


def _overview(rows: _Rows, tau: float) -> Table:
  """Builds a line per method: its record, and held-out contexts at tau."""
  lines = []
  for row in rows:
    held_out = row["held_out"]
    line = {
      "method": row["method"],
      "R2": _r2(dict(row["r2"]).get("all")),
      "asked": wording.share(row["asked"]),
      "retention": wording.share(held_out["retention"]),
      "kept": wording.share(held_out["kept"]),
      "needed": wording.share(held_out["needed"]),
      "times": _with_interval(held_out, "times", 2),
      "quality": f"{held_out['ratio']:.3f}",
      "capped": _with_interval(held_out, "capped", 3),
      "NLL ratio": f"{held_out['nll_ratio']:.3f}",
    }
    lines.append(list(line.values()))
  return Table(f"calibrations, and others at tau {tau:g}", list(line), lines)


def _with_interval(means: Mapping[str, Any], name: str, digits: int) -> str:
  """Formats a mean and its 95 % interval: `1.55 (1.37–1.80)`."""
  ends = "–".join(f"{end:.{digits}f}" for end in means["intervals"][name])
  return f"{means[name]:.{digits}f} ({ends})"


def _rules(rows: _Rows) -> Table:
  """Builds a line per method: the numbers of its rule, and R2 by task."""
  tasks = list(rows[0]["tasks"])
  lines = []
  for row in rows:
    r2 = dict(row["r2"])
    lines.append(
      [
        row["method"],
        _kc(row),
        f"{row['error']:.3f}",
        *(_r2(r2.get(task)) for task in tasks),
      ]
    )
  names = [task.removeprefix("niah_") for task in tasks]
  header = ["method", "kc", "error", *names]
  return Table("rules, and R2 by task", header, lines)


def _kc(row: Mapping[str, Any]) -> str:
  """Formats the sum that is kc, as in `+1.5 NLL −7`; nothing without one."""
  if row["preset"] == "recite":
    return wording.NOTHING
  terms = [(" NLL", row["alpha"]), ("", row["beta"])]
  terms += [(f" {name}", slope) for name, slope in row["slopes"]]
  text = " ".join(f"{slope:+.3g}{name}" for name, slope in terms)
  return text.replace("-", "−")


def _r2(value: float | None) -> str:
  if value is None:
    return wording.NOTHING
  text = f"{value:.2f}" if value >= _LEAST_R2 else f"< {_LEAST_R2}"
  return text.replace("-", "−")


def _measured(rows: _Rows) -> Table:
  """Builds a table of qualities with a column per retention."""
  names = list(rows[0]["measured"])
  lines = [
    [row["method"], *(f"{row['measured'][name]:.3f}" for name in names)]
    for row in rows
  ]
  header = ["method", *(wording.share(float(name)) for name in names)]
  return Table("quality by retention, mean over tasks", header, lines)


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
