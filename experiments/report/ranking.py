"""A leaderboard: one table of runs per combination of settings."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import rich.console
import rich.text

from kvjax.experiments.benchmarks.registry import presentation
from kvjax.experiments.report import (
  formats,
  page,
  pictures,
  score_plots,
  wording,
)
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.means import (
  OF_GLOBAL_LAYERS,
  Mean,
  is_hybrid,
  means,
  ranked,
  ranks,
)
from kvjax.experiments.report.rows import SETTINGS, settings_of
from kvjax.experiments.report.run_files import SUMMARY, Record
from kvjax.experiments.report.tables import grid, overview, parts
from kvjax.experiments.run import sending
from kvjax.experiments.run.measured import rounded

# Method, options and budget.
_Key = tuple[str, str, str]
# Benchmark, model, lengths, and all other settings.
_Identity = tuple[str, str, tuple[int, ...], str]
_ASKED = ("task", "depth", "turn")
# The settings that stand first in lines of the CSV file, and those after them.
_MAIN = ("model", "protocol", "schedule", "heads", "kv_dtype")
_REST = tuple(
  name for name in SETTINGS if name not in ("benchmark", "data", *_MAIN)
)
# Letters of a method's name that leave room for its rank on a terminal.
_LEAST = 10
# The columns of the CSV file after those of retention.
_MEASURED = (
  *("context_tokens", "kept_tokens", "read_tokens", "cache_bytes"),
  *("host_bytes", "decoding_bytes", "answer_tokens"),
)


class Entry(NamedTuple):
  """A method at a budget.

  Attributes:
    mean: its result, compared with the full cache of the same run.
    record: the run, or its part at one length.
  """

  mean: Mean
  record: Record


@dataclasses.dataclass(frozen=True)
class Group:
  """Entries that answered the same questions under the same settings.

  Attributes:
    entries: by method, options and budget.
  """

  entries: dict[_Key, Entry]

  @property
  def first(self) -> Record:
    """A run with the settings that all share."""
    return next(iter(self.entries.values())).record

  @property
  def title(self) -> str:
    """A summary of the common settings."""
    summary = self.first.summary
    return (
      f"{summary['benchmark']}, {wording.lengths(summary)} tokens: "
      f"{summary['model']}, {summary['protocol']}, {wording.keeping(summary)}"
    )

  @property
  def notes(self) -> list[str]:
    """The other common settings, and the circumstances of each run."""
    summary = self.first.summary
    about = (
      f"{wording.score_name(summary)}: "
      f"{wording.averaged(self.first.values('task'), every=True)}. "
      f"Weights {summary['weights']}, Python {summary['python']}, "
      f"data: {wording.data(summary)}."
    )
    budgets = f"B{OF_GLOBAL_LAYERS[1:]}." if is_hybrid(self._means) else ""
    runs = {
      _run(entry.record): wording.circumstances(entry.record.summary)
      for entry in self.entries.values()
    }
    return [
      about,
      *filter(None, [budgets]),
      *(f"{run}: {text}" for run, text in runs.items()),
    ]

  @property
  def headline(self) -> str:
    """The best method and its scores; empty without methods to compare."""
    return wording.headline(self._means)

  @property
  def scores(self) -> Table:
    """A line per method and a column per budget."""
    by_retention = sorted(self._means, key=lambda mean: -mean.retention)
    return self._with_ranks(grid(by_retention, wording.INTERVALS))

  @property
  def table(self) -> Table:
    """A line per method and budget."""
    shown = presentation(self.first.summary["benchmark"])
    return self._with_ranks(overview(self._means, "", shown))

  @property
  def plot(self) -> bytes:
    """A PNG of scores against retention."""
    axis = wording.score_axis(self.first.summary)
    figure = score_plots.means_vs_retention(self._means, self.title, axis)
    return pictures.png(figure)

  @property
  def lines(self) -> list[dict[str, Any]]:
    """A line of the CSV file per entry."""
    rank = ranks(self._means)
    return [
      {"rank": rank.get(self._shown(entry.mean).method), **_line(entry)}
      for entry in self.entries.values()
    ]

  @property
  def _means(self) -> list[Mean]:
    """Ranked, as they are shown."""
    averages = [self._shown(entry.mean) for entry in self.entries.values()]
    averages.sort(key=lambda mean: -mean.retention)
    return ranked(averages)

  def _shown(self, mean: Mean) -> Mean:
    """Names a method by its options if others share its name."""
    options = {own for name, own, _ in self.entries if name == mean.method}
    if len(options) == 1:
      return mean
    return dataclasses.replace(mean, method=mean.options)

  def _with_ranks(self, table: Table) -> Table:
    """Puts the ranks of methods before their names."""
    rank = ranks(self._means)
    lines = [
      [str(rank.get(line[table.named], wording.NOTHING)), *line]
      for line in table.lines
    ]
    return table._replace(
      header=["rank", *table.header],
      lines=lines,
      names=table.names + 1,
      least=_LEAST,
      named=table.named + 1,
    )


class Leaderboard(NamedTuple):
  """The results of several runs.

  Attributes:
    groups: groups of comparable entries.
    remarks: sentences about omissions.
  """

  groups: Sequence[Group]
  remarks: Sequence[str]

  def plots(self) -> dict[str, bytes]:
    """Draws the plot of each group; returns PNG files by name."""
    return {
      f"leaderboard_{number}.png": group.plot
      for number, group in enumerate(self.groups, start=1)
    }

  def to_csv(self) -> str:
    """Formats a line per entry."""
    return formats.to_csv(line for group in self.groups for line in group.lines)

  def to_markdown(self, plots: Sequence[str]) -> str:
    """Formats a section per group.

    It has the headline, scores by budget, the plot, then every number.

    Args:
      plots: file names of the groups' plots.
    """
    blocks: list[str | Table] = ["# Leaderboard"]
    for group, plot in zip(self.groups, plots, strict=True):
      blocks += [
        f"## {formats.escaped(group.title)}",
        formats.escaped(group.headline),
        group.scores,
        f"![Score against retention]({plot})",
        group.table,
        *map(formats.escaped, group.notes),
      ]
    return formats.document(*blocks, *map(formats.escaped, self.remarks))

  def to_html(self, plots: Sequence[bytes]) -> str:
    """Renders a self-contained page."""
    return page.render(
      "leaderboard",
      title="Leaderboard",
      groups=list(zip(self.groups, map(page.source, plots), strict=True)),
      remarks=self.remarks,
    )

  def to_terminal(self) -> rich.console.Group:
    """Formats the tables for a terminal of 80 columns."""
    shown: list[rich.console.RenderableType] = []
    for group in self.groups:
      shown.append(rich.text.Text(group.title, style="bold"))
      if group.headline:
        shown.append(rich.text.Text(group.headline))
      shown.append(group.table)
      shown += [rich.text.Text(note, style="dim") for note in group.notes]
      shown.append("")
    return rich.console.Group(*shown, *map(rich.text.Text, self.remarks))


def merge(
  records: Sequence[Record], unfinished: Sequence[pathlib.Path] = ()
) -> Leaderboard:
  """Groups runs with the same settings; sample counts may differ.

  If two runs have the same entry, the one with the newer summary counts.

  Args:
    records: the runs.
    unfinished: folders of unfinished runs, which are left out.
  """
  groups: dict[_Identity, Group] = {}
  replaced: dict[tuple[str, str], int] = {}
  by_age = sorted(
    records, key=lambda r: (r.folder / SUMMARY).stat().st_mtime_ns
  )
  for record in by_age:
    for part in parts(record):
      entries = groups.setdefault(_identity(part), Group({})).entries
      for mean in means(part.summary["rows"], part.answers):
        key = (mean.method, mean.options, mean.budget)
        if key in entries:
          pair = (_run(entries[key].record), _run(record))
          replaced[pair] = replaced.get(pair, 0) + 1
        entries[key] = Entry(mean, part)
  sentences = [
    f"{wording.count(number, 'line')} of {old} gave way to those of {new}, "
    "which is newer."
    for (old, new), number in replaced.items()
  ]
  sentences += [
    f"{sending.named(str(folder))} is left out: its run is unfinished; repeat "
    "the command that started it to resume."
    for folder in unfinished
  ]
  return Leaderboard([groups[key] for key in sorted(groups)], sentences)


def _run(record: Record) -> str:
  """Names a run by its folder, or by the address that it is a copy of."""
  return sending.named(str(record.folder))


def _identity(part: Record) -> _Identity:
  summary = part.summary
  samples = [sorted(map(str, part.values(name))) for name in _ASKED]
  rest = [settings_of(summary), *samples]
  lengths = tuple(part.values("length"))
  return (
    summary["benchmark"],
    summary["model"],
    lengths,
    json.dumps(rest, sort_keys=True),
  )


def _line(entry: Entry) -> dict[str, Any]:
  mean, summary = entry.mean, entry.record.summary
  own = entry.record.at(method=mean.method, budget=mean.budget)
  low, high = mean.interval or (None, None)
  return {
    "dataset": summary["benchmark"],
    "length": wording.lengths(own.summary),
    **{name: summary[name] for name in _MAIN},
    **{name: getattr(mean, name) for name in ("method", "options", "budget")},
    "retention": rounded("retention", mean.retention),
    "compression_ratio": round(mean.removed, 4),
    **{name: rounded(name, getattr(mean, name)) for name in _MEASURED},
    "prefill_seconds": _significant(mean.prefill_seconds),
    "token_seconds": _significant(mean.token_seconds),
    "score": round(mean.score, 2),
    **{name: round(share, 2) for name, share in mean.passed.items()},
    "interval_low": _rounded(low),
    "interval_high": _rounded(high),
    "delta": _rounded(mean.delta),
    "samples": mean.samples,
    "tasks": " ".join(own.values("task")),
    **{name: summary[name] for name in _REST},
    "data": wording.data(summary),
    "device": summary["device"],
    "versions": wording.versions(summary["versions"]),
    "run": _run(entry.record),
  }


def _rounded(value: float | None) -> float | None:
  return None if value is None else round(value, 2)


def _significant(value: float | None) -> float | None:
  return None if value is None else float(f"{value:.4g}")
