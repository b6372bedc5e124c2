"""The tables of a run as data; `formats` formats them."""

import itertools
from collections.abc import Callable, Mapping, Sequence

from kvjax.experiments.benchmarks.base import Presentation
from kvjax.experiments.benchmarks.registry import presentation
from kvjax.experiments.report import series, wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.means import (
  OF_GLOBAL_LAYERS,
  Mean,
  complete,
  grouped,
  is_hybrid,
  means,
  ranked,
  reads_less,
)
from kvjax.experiments.report.run_files import Record
from kvjax.experiments.run.candidates import FULL

# Letters of an average's label.
_SET = 32


def tables(record: Record, brief: bool = False) -> list[Table]:
  """Builds all tables of a run, or in brief those that fit on a terminal."""
  result = of_parts(record, _in_brief if brief else _in_full)
  if len(record.values("length")) > 1:
    shown = at_middle(record) if brief else record
    if not brief or len(parts(record)) == 1:
      result += series.by_length(shown)
    result += series.weighted_by_length(shown)
  return result


def of_parts(
  record: Record, build: Callable[[Record], list[Table]]
) -> list[Table]:
  """Builds the tables of all parts; if several, titles start with the length.

  Args:
    record: the run.
    build: builds the tables of a part.
  """
  run_parts = parts(record)
  result: list[Table] = []
  for part in run_parts:
    tokens = f"{wording.lengths(part.summary)} tokens: "
    start = tokens if len(run_parts) > 1 else ""
    result += [
      table._replace(title=start + table.title) for table in build(part)
    ]
  return result


def parts(record: Record) -> list[Record]:
  """Splits a run into parts with their own tables and plots, one per length.

  A run with depths is one part, since its heatmap covers all lengths.
  """
  if has_depths(record):
    return [record]
  return [record.at(length=length) for length in record.values("length")]


def has_depths(record: Record) -> bool:
  """Returns whether all samples have a depth."""
  return None not in record.values("depth")


def overview(
  summary_means: Sequence[Mean], title: str, shown: Presentation
) -> Table:
  """Builds a table with a line per method and budget, with uncertainties.

  Scores over other tasks than others' are dashes, as in `grid`.

  Args:
    summary_means: the lines.
    title: title of the table.
    shown: the name of the score, and whether answers are long.
  """
  comparable = complete(summary_means)
  columns = {
    "method": [mean.method for mean in summary_means],
    "budget": [wording.budget(*mean.name) for mean in summary_means],
    **_tokens(summary_means),
    shown.score: [_score(mean, comparable) for mean in summary_means],
    "95 %": [
      wording.interval(mean.interval if mean in comparable else None)
      for mean in summary_means
    ],
    "Δ full": [wording.signed(mean.delta) for mean in summary_means],
    "n": [str(mean.samples) for mean in summary_means],
    **of_bytes(summary_means),
    **_seconds(summary_means),
  }
  if shown.long_answers:
    columns |= _passed(summary_means) | _answers(summary_means)
  return Table.of_columns(title, columns, names=2)


def by_budget(record: Record) -> Table:
  """Builds a table of scores with half intervals, with a column per budget.

  For automatic budgets and thresholds, cells also show the mean retention.
  """
  summary_means = means(record.summary["rows"], record.answers)
  tasks = wording.averaged(record.values("task"))
  least = min(mean.samples for mean in complete(summary_means))
  name = wording.score_name(record.summary)
  title = f"{name}, {tasks}, n = {least}; {wording.INTERVALS}"
  if is_hybrid(summary_means):
    title += f"; {OF_GLOBAL_LAYERS}"
  return grid(summary_means, title)


def grid(summary_means: Sequence[Mean], title: str) -> Table:
  """Builds a table with a line per method, ranked, and a column per budget.

  Cells over other tasks, lengths or depths than most are dashes, as they cannot
  be compared; see `complete`.

  Args:
    summary_means: the cells; a score has the longer half of its interval.
    title: title of the table.
  """
  cells: dict[str, dict[str, str]] = {}
  comparable = complete(summary_means)
  for mean in ranked(summary_means):
    row = cells.setdefault(mean.method, {})
    if mean not in comparable:
      row[wording.budget(*mean.name)] = wording.NOTHING
      continue
    reached = f" at {wording.share(mean.retention)}" if mean.automatic else ""
    score = wording.with_uncertainty(mean.score, mean.interval)
    row[wording.budget(*mean.name)] = score + reached
  # Methods may have budgets of their own; automatic ones stay as they are.
  by_size = sorted(
    summary_means,
    key=lambda mean: (
      mean.automatic,
      0.0 if mean.automatic else -mean.retention,
    ),
  )
  names = list(dict.fromkeys(wording.budget(*mean.name) for mean in by_size))
  lines = [
    [method, *(row.get(name, "") for name in names)]
    for method, row in cells.items()
  ]
  return Table(title, ["method", *names], lines)


def by_task(record: Record) -> Table:
  """Builds a table for one budget: a line per method, a column per task."""
  summary_means = means(record.summary["rows"], record.answers)
  comparable = complete(summary_means)
  tasks = record.values("task")
  lines = [
    [
      mean.method,
      *(series.number(mean.tasks.get(task)) for task in tasks),
      _score(mean, comparable),
      wording.signed(mean.delta),
    ]
    for mean in summary_means
  ]
  names = [task.removeprefix("niah_") for task in tasks]
  title = f"tasks at {wording.budget(*summary_means[-1].name)}"
  return Table(title, ["method", *names, "mean", "Δ full"], lines)


def by_set(
  record: Record, averages: Callable[[Mapping[str, float]], Mapping[str, float]]
) -> Table:
  """Builds a table of many tasks for one budget, with a column per method.

  Lines are tasks and their `averages`, which are dashes of methods that lack
  tasks. The difference from the full cache is that of the plain mean.
  """
  summary_means = means(record.summary["rows"], record.answers)
  comparable = complete(summary_means)
  sets = record.values("task")
  lines = [
    [name, *(series.number(mean.tasks.get(name)) for mean in summary_means)]
    for name in sets
  ]
  of_methods = [
    averages(mean.tasks) if mean in comparable else {} for mean in summary_means
  ]
  lines += [
    [name, *(series.number(own.get(name)) for own in of_methods)]
    for name in dict.fromkeys(itertools.chain(*of_methods))
  ]
  lines += [
    [
      f"all {len(sets)} sets",
      *(_score(mean, comparable) for mean in summary_means),
    ],
    ["Δ full", *(wording.signed(mean.delta) for mean in summary_means)],
  ]
  title = f"sets at {wording.budget(*summary_means[-1].name)}"
  # If columns are split over tables, each has the first method, the full cache.
  header = ["set", *(mean.method for mean in summary_means)]
  return Table(title, header, lines, names=2, least=_SET)


def costs(record: Record) -> Table:
  """Builds a table for one budget: tokens kept and read, and bytes."""
  summary_means = means(record.summary["rows"])
  columns = {
    "method": [mean.method for mean in summary_means],
    **_tokens(summary_means),
    **of_bytes(summary_means),
  }
  if presentation(record.summary["benchmark"]).long_answers:
    columns |= _answers(summary_means)
  title = f"caches at {wording.budget(*summary_means[-1].name)}"
  return Table.of_columns(title, columns)


def _in_full(part: Record) -> list[Table]:
  summary_means = means(part.summary["rows"], part.answers)
  title = wording.averaged(part.values("task"))
  shown = presentation(part.summary["benchmark"])
  result = [by_budget(part), overview(summary_means, title, shown)]
  for budget in budget_names(part):
    result += _tasks(_at(part, budget))
  return [*result, *series.other_scores(part), *series.by_turn(part)]


def _in_brief(part: Record) -> list[Table]:
  """Builds a table of all budgets, and others for the middle one."""
  middle = at_middle(part)
  lookups = reads_less(means(middle.summary["rows"]))
  long_answers = presentation(part.summary["benchmark"]).long_answers
  return [
    by_budget(part),
    *([costs(middle)] if lookups or long_answers else []),
    *_tasks(middle),
    *series.other_scores(middle),
    *series.by_turn(middle),
  ]


def _tasks(part: Record) -> list[Table]:
  if len(part.values("task")) == 1:
    return []
  averages = presentation(part.summary["benchmark"]).averages_of_tasks
  return [by_task(part) if averages is None else by_set(part, averages)]


def at_middle(record: Record) -> Record:
  """Selects the full cache and the rows of the middle budget."""
  budgets = budget_names(record)
  return _at(record, budgets[len(budgets) // 2])


def _at(record: Record, budget: str) -> Record:
  """Selects the full cache and a budget."""
  return record.select(
    lambda own: own["method"] == FULL or own["budget"] == budget
  )


def budget_names(record: Record) -> list[str]:
  """Returns the methods' budgets, or else the full cache's."""
  names = grouped(record.summary["rows"])
  budgets = dict.fromkeys(budget for method, budget in names if method != FULL)
  return list(budgets) or [budget for _, budget in names]


def _score(mean: Mean, comparable: Sequence[Mean]) -> str:
  """Formats a score, or a dash if it is over other tasks than those of most."""
  return series.number(mean.score if mean in comparable else None)


def _tokens(summary_means: Sequence[Mean]) -> dict[str, list[str]]:
  """Builds columns of tokens kept and, if fewer, tokens read.

  If some layers have a window, tokens are kept in the global ones, and in all.
  """
  columns = {"kept": [f"{mean.kept_tokens:.0f}" for mean in summary_means]}
  if is_hybrid(summary_means):
    of_global = [
      "" if mean.global_tokens is None else f"{mean.global_tokens:.0f}"
      for mean in summary_means
    ]
    columns = {"kept, global": of_global, "kept, all": columns["kept"]}
  if reads_less(summary_means):
    columns["read"] = [f"{mean.read_tokens:.0f}" for mean in summary_means]
  return columns


def of_bytes(summary_means: Sequence[Mean]) -> dict[str, list[str]]:
  """Builds columns of allocated bytes and the part in host memory."""
  unit, size = _unit(summary_means)
  columns = {unit: [_size(mean.cache_bytes / size) for mean in summary_means]}
  if any(mean.host_bytes for mean in summary_means):
    columns["on host"] = [
      _size(mean.host_bytes / size) for mean in summary_means
    ]
  return columns


def _unit(summary_means: Sequence[Mean]) -> tuple[str, float]:
  """Chooses a unit for all sizes of a table, also those while decoding."""
  return wording.unit(mean.cache_bytes for mean in summary_means)


def _seconds(summary_means: Sequence[Mean]) -> dict[str, list[str]]:
  """Builds columns of the times of one prompt alone, if any is known."""
  if all(mean.prefill_seconds is None for mean in summary_means):
    return {}
  return {
    "prefill, ms": [
      _known(mean.prefill_seconds, 1e-3) for mean in summary_means
    ],
    "token, ms": [_known(mean.token_seconds, 1e-3) for mean in summary_means],
  }


def _passed(summary_means: Sequence[Mean]) -> dict[str, list[str]]:
  """Builds columns of pass@k, if several answers are drawn for a problem."""
  comparable = complete(summary_means)
  names = dict.fromkeys(name for mean in summary_means for name in mean.passed)
  return {
    name: [
      series.number(mean.passed.get(name) if mean in comparable else None)
      for mean in summary_means
    ]
    for name in names
  }


def _answers(summary_means: Sequence[Mean]) -> dict[str, list[str]]:
  """Builds columns of answers' tokens, and of bytes while they are decoded."""
  unit, size = _unit(summary_means)
  return {
    "answer": [_known(mean.answer_tokens, 1) for mean in summary_means],
    f"{unit}, decoding": [
      _known(mean.decoding_bytes, size) for mean in summary_means
    ],
  }


def _known(value: float | None, unit: float) -> str:
  return wording.NOTHING if value is None else _size(value / unit)


def _size(value: float) -> str:
  return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}"
