"""The summary of a comparison as a table, for terminals and Markdown."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from experiments.candidates import FULL

Row = Mapping[str, Any]


def title(summary: Mapping[str, Any]) -> str:
  """What a table or a plot of the summary is about."""
  fewest = min(row["samples"] for row in summary["rows"])
  return (
    f"{summary['model']}, {summary['length']} tokens, {summary['protocol']}, "
    f"{summary['schedule']}, per {summary['heads']}, {fewest} samples per task"
  )


def circumstances(summary: Mapping[str, Any]) -> str:
  """How the numbers came about."""
  versions = summary["versions"].items()
  return (
    f"Seed {summary['seed']}, greedy, {summary['dtype']} on "
    f"{summary['device']}; "
    + ", ".join(f"{name} {version}" for name, version in versions)
    + "."
  )


def means(rows: Sequence[Row]) -> list[dict[str, Any]]:
  """One row per method and budget, in order: unweighted means over tasks.

  At a retention of 1 the full cache stands for all methods.
  """
  groups: dict[tuple[str, str], list[Row]] = {}
  for row in rows:
    if row["method"] != FULL and row["budget"] == "1":
      continue
    groups.setdefault((row["method"], row["budget"]), []).append(row)

  def mean(group: list[Row], name: str) -> float:
    return statistics.fmean(row[name] for row in group)

  return [
    {
      "method": method,
      "budget": budget,
      "scores": {row["task"]: row["score"] for row in group},
      **{
        name: mean(group, name)
        for name in (
          "retention",
          "score",
          "context_tokens",
          "kept_tokens",
          "read_tokens",
          "cache_bytes",
          "host_bytes",
        )
      },
    }
    for (method, budget), group in groups.items()
  ]


def reads_less(rows: Sequence[Row]) -> bool:
  """Whether tokens attend to less than what is kept."""
  return any(row["read_tokens"] != row["kept_tokens"] for row in rows)


def to_markdown(summary: Mapping[str, Any]) -> str:
  """The table, its title and its circumstances."""
  header, lines = _cells(summary["rows"])
  left = [":--"] + ["--:"] * (len(header) - 1)
  table = "\n".join(
    f"| {' | '.join(cells)} |" for cells in (header, left, *lines)
  )
  return f"**{title(summary)}**\n\n{table}\n\n{circumstances(summary)}\n"


def to_terminal(summary: Mapping[str, Any]) -> rich.console.Group:
  """The same for a terminal of 80 columns."""
  header, lines = _cells(summary["rows"])
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  table.add_column(header[0], overflow="fold")
  for name in header[1:]:
    name = name.replace("multi", "multi\n").replace("_", " ")
    table.add_column(name, justify="right", no_wrap=True)
  shown = ""
  for cells, following in itertools.zip_longest(lines, lines[1:]):
    method = "" if cells[0] == shown else cells[0]
    shown = cells[0]
    last = following is None or following[0] != shown
    table.add_row(method, *cells[1:], end_section=last)
  about = rich.text.Text(circumstances(summary), style="dim")
  return rich.console.Group(rich.text.Text(title(summary)), table, about)


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
  tasks = list(dict.fromkeys(row["task"] for row in rows))
  names = [task.removeprefix("niah_") for task in tasks]
  header = ["method", "budget", *names, "mean", "kept", "KiB"]
  lines = [
    [
      mean["method"],
      f"{100 * mean['retention']:.3g} %",
      *(f"{mean['scores'][task]:.1f}" for task in tasks),
      f"{mean['score']:.1f}",
      f"{mean['kept_tokens']:.0f}",
      f"{mean['cache_bytes'] / 1024:.0f}",
    ]
    for mean in means(rows)
  ]
  if reads_less(rows):
    header.insert(-1, "read")
    for line, mean in zip(lines, means(rows), strict=True):
      line.insert(-1, f"{mean['read_tokens']:.0f}")
  if any(row["host_bytes"] for row in rows):
    header.append("of host")
    for line, mean in zip(lines, means(rows), strict=True):
      line.append(f"{mean['host_bytes'] / 1024:.0f}")
  return header, lines
