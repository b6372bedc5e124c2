"""Tables of our numbers next to the paper's."""

from collections.abc import Iterable, Iterator, Sequence

from kvjax.experiments.papers.compare_to_paper import PaperComparison
from kvjax.experiments.papers.data_model import Comparison, Key, Targets
from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.wording import NOTHING
from kvjax.experiments.run.candidates import FULL


def tables(compared: PaperComparison) -> list[Table]:
  """Builds tables per average, by size, and per line printed by task."""
  shown = [_of_average(compared, name) for name in compared.averages]
  return [*shown, *_by_size(compared), *_by_task(compared)]


def _of_average(compared: PaperComparison, name: str) -> Table:
  small = compared.scale == "small"
  full = _full(compared.comparison)
  lines = []
  for line in _names(compared.comparison):
    cell_lines = []
    for column in compared.comparison.columns:
      cells = _cells(compared, Key(line, column.name, name))
      here = compared.here.get((line, column.name), NOTHING)
      if set(cells) != {NOTHING}:
        place = [line, column.name, *([here] if small else [])]
        cell_lines.append([*place, *cells])
    lines += _compact(cell_lines, line in full)
  header = ["method", "at", *(["here"] if small else []), *_models(compared)]
  return Table(_title(compared, name), header, lines, names=3 if small else 2)


def _by_size(compared: PaperComparison) -> Iterator[Table]:
  """Yields the headline sorted by the comparison's size, if it has one."""
  size = compared.comparison.size
  if size is None:
    return
  name = next(iter(compared.averages))
  lines = [
    [str(number), *place, *_cells(compared, Key(*place, name))]
    for place, number in sorted(compared.sizes.items(), key=lambda x: x[1])
  ]
  header = [size.name, "method", "at", *_models(compared)]
  yield Table(f"{_title(compared, name)}, by size", header, lines, names=3)


def _full(comparison: Comparison) -> set[str]:
  """Returns the names of the full cache."""
  return {x.name for x in comparison.lines if x.paper.method == FULL}


def _cells(compared: PaperComparison, key: Key) -> list[str]:
  """Formats our number, its samples, and the numbers of the paper's models."""
  number, ours = compared.ours.get(key), [NOTHING, NOTHING]
  if number is not None:
    score = wording.with_uncertainty(number.score, number.interval)
    ours = [score, str(number.samples)]
  return [*ours, *(_printed(t, key) for t in compared.comparison.targets)]


def _models(compared: PaperComparison) -> list[str]:
  targets = compared.comparison.targets
  return ["ours", "n", *(paper.model for paper in targets)]


def _compact(lines: Iterable[Sequence[str]], full: bool) -> list[Sequence[str]]:
  """Merges lines that differ only in the column.

  Args:
    lines: the results of a method, a line per column.
    full: whether the method is the full cache, whose missing results equal the
      others.
  """
  lines = list(lines)
  values = [
    {cell for cell in cells if not full or cell != NOTHING} or {NOTHING}
    for cells in zip(*lines, strict=True)
  ]
  names, _, *numbers = values or [set(), set()]
  if len(lines) > 1 and all(len(column) == 1 for column in (names, *numbers)):
    return [(*names, "all", *(column.pop() for column in numbers))]
  return lines


def _title(compared: PaperComparison, name: str) -> str:
  """Names the average and the tasks of it that ran."""
  wanted = next(a for a in compared.comparison.averages if a.name == name).tasks
  tasks_run = compared.averages[name].tasks
  title = f"{compared.comparison.name}: {name}"
  if set(tasks_run) == set(wanted):
    return title
  if set(tasks_run) <= set(wanted):
    return f"{title} (ours: {len(tasks_run)} of {len(wanted)} tasks)"
  return f"{title} (ours: mean of {', '.join(tasks_run)})"


def _by_task(compared: PaperComparison) -> Iterator[Table]:
  """Yields tables of lines whose tasks the paper prints and we ran."""
  tasks_run = {key.what for key in compared.ours} - set(compared.averages)
  tasks = [
    task for task in compared.comparison.paper.tasks if task in tasks_run
  ]
  printed = {
    key for targets in compared.comparison.targets for key in targets.numbers
  }
  full = _full(compared.comparison)
  for line in _names(compared.comparison):
    lines: list[Sequence[str]] = []
    for task in tasks:
      keys = [Key(line, c.name, task) for c in compared.comparison.columns]
      cell_lines = (
        (task, key.column, *_cells(compared, key))
        for key in keys
        if key in printed
      )
      lines += _compact(cell_lines, line in full)
    if lines:
      title = f"{compared.comparison.name}: {line} by task"
      yield Table(title, ["task", "at", *_models(compared)], lines, names=2)


def _names(comparison: Comparison) -> list[str]:
  return [*(line.name for line in comparison.lines), *comparison.quoted]


def _printed(targets: Targets, key: Key) -> str:
  """Formats a paper's number; doubtful ones get a question mark."""
  if key not in targets.numbers:
    return NOTHING
  doubt = "?" if key.line in targets.doubts else ""
  return f"{targets.numbers[key]:.4g}{doubt}"
