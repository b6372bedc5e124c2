"""Compares our numbers with the paper's."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.experiments.papers.data_model import (
  Average,
  Column,
  Comparison,
  Key,
  Line,
  Place,
)
from kvjax.experiments.papers.findings import Scale
from kvjax.experiments.report import wording
from kvjax.experiments.run import intervals
from kvjax.experiments.run.candidates import FULL, Candidate
from kvjax.experiments.run.results import Answer

# Said where an order is shown.
MEANING = (
  "a > b: the 95 % interval of their paired difference over samples is above "
  "0; a = b: it holds 0. The papers' orders are those of the printed numbers."
)

# The candidate of a line in a column; None if it does not run.
Cells = Mapping[tuple[Line, Column], Candidate | None]


class Number(NamedTuple):
  """A mean score of ours.

  Attributes:
    score: the mean, 0 to 100.
    interval: its 95 % interval.
    samples: number of samples of all tasks.
  """

  score: float
  interval: tuple[float, float]
  samples: int


class PaperComparison(NamedTuple):
  """The numbers of a comparison.

  Attributes:
    comparison: the comparison.
    scale: the scale of its setup.
    averages: averages over the tasks that ran, of scores that all answers have;
      see `averages_of`.
    answers: the answers of a line in a column.
    ours: our numbers, for averages and tasks.
    here: the budget that a line in a column had here.
    sizes: the comparison's size of a line in a column, if it has one.
  """

  comparison: Comparison
  scale: Scale
  averages: Mapping[str, Average]
  answers: Mapping[tuple[str, str], Sequence[Answer]]
  ours: Mapping[Key, Number]
  here: Mapping[tuple[str, str], str]
  sizes: Mapping[tuple[str, str], int]


def compare_to_paper(
  comparison: Comparison, scale: Scale, cells: Cells, answers: Sequence[Answer]
) -> PaperComparison:
  """Averages answers as the paper does.

  Args:
    comparison: the comparison.
    scale: the scale of its setup.
    cells: the candidate of each cell.
    answers: the answers of a run. Averages of scores that older answers lack
      are left out.
  """
  tasks = list(dict.fromkeys(answer.task for answer in answers))
  averages = {
    name: average
    for name, average in averages_of(comparison, tasks).items()
    if all(
      average.score in answer.scores
      for answer in answers
      if answer.task in average.tasks
    )
  }
  quantities = [*averages.values(), *_single_tasks(averages, tasks)]
  matching, ours, here, sizes = {}, {}, {}, {}
  for (line, column), candidate in cells.items():
    place = column.at(scale)
    if candidate is None or place is None:
      continue
    cell = line.name, column.name
    matching[cell] = [a for a in answers if _matches(a, candidate, place)]
    here[cell] = wording.budget(candidate.method, candidate.budget)
    size = comparison.size and comparison.size.of(candidate)
    if size is not None:
      sizes[cell] = size
    for quantity in quantities:
      number = _number(quantity, matching[cell])
      if number is not None:
        ours[Key(*cell, quantity.name)] = number
  return PaperComparison(
    comparison, scale, averages, matching, ours, here, sizes
  )


def averages_of(
  comparison: Comparison, tasks_run: Sequence[str]
) -> dict[str, Average]:
  """Restricts the paper's averages to the tasks that ran.

  An average without any of these tasks is dropped. The headline average becomes
  the mean of all tasks that ran instead.
  """
  kept = {}
  for number, average in enumerate(comparison.averages):
    restricted = average.over(tasks_run)
    if not restricted.groups and number == 0:
      groups = (tuple(tasks_run),)
      restricted = Average(average.name, groups, average.score)
    if restricted.groups:
      kept[average.name] = restricted
  return kept


def orders(compared: PaperComparison) -> list[str]:
  """Describes the order of methods at each column, here and in the paper.

  The full cache and doubtful numbers are left out. A line says so if the
  samples do not tell any method from the next one.
  """
  headline = next(iter(compared.averages))
  lines = []
  undecided = []
  for column in compared.comparison.columns:
    names = [
      line.name
      for line in compared.comparison.lines
      if line.paper.method != FULL
      and Key(line.name, column.name, headline) in compared.ours
    ]
    ranked: dict[str, list[str]] = {}
    for targets in compared.comparison.targets:
      theirs = {
        name: targets.numbers[key]
        for name in names
        if (key := Key(name, column.name, headline)) in targets.numbers
        and name not in targets.doubts
      }
      if len(theirs) > 1:
        ours = _our_order(compared, theirs, column.name)
        text = f"{targets.model} {_printed_order(theirs)}"
        ranked.setdefault(ours, []).append(text)
    if len(names) > 1 and not ranked:
      ranked[_our_order(compared, names, column.name)] = []
    if ranked and not any(">" in ours for ours in ranked):
      undecided.append(column.name)
      continue
    lines += [
      f"Order at {column.name}: ours {ours}; {'; '.join(theirs)}."
      for ours, theirs in ranked.items()
      if theirs
    ]
  if undecided:
    lines.append(
      f"At {', '.join(undecided)} no method differs from the next in rank by "
      "more than chance; others are not compared."
    )
  return lines


def as_data(compared: PaperComparison) -> list[dict[str, Any]]:
  """Returns one record per cell, for other programs."""
  keys = dict.fromkeys(compared.ours)
  for targets in compared.comparison.targets:
    keys |= dict.fromkeys(targets.numbers)
  return [
    {
      "line": key.line,
      "column": key.column,
      "what": key.what,
      "here": compared.here.get((key.line, key.column)),
      **_as_fields(compared.ours.get(key)),
      "paper": {
        targets.model: targets.numbers[key]
        for targets in compared.comparison.targets
        if key in targets.numbers
      },
    }
    for key in keys
  ]


def methods(compared: PaperComparison) -> str:
  """Lists the methods that the paper's names stand for here."""
  scale = compared.scale
  names = [
    f"{line.name} is {way.method}"
    for line in compared.comparison.lines
    if (way := line.at(scale)) is not None
  ]
  return f"{'; '.join(names)}."


def _number(average: Average, answers: Sequence[Answer]) -> Number | None:
  """Computes an average of answers; None if its tasks have none."""
  tasks: dict[str, list[float]] = {}
  for answer in answers:
    if answer.task in average.tasks:
      tasks.setdefault(answer.task, []).append(answer.scores[average.score])
  if not tasks:
    return None
  average = average.over(tasks)
  means = {task: sum(scores) / len(scores) for task, scores in tasks.items()}
  of_tasks = [answer for answer in answers if answer.task in tasks]
  return Number(
    average.mean(means),
    intervals.interval(of_tasks, average.weights, average.score),
    intervals.count_samples(of_tasks),
  )


def _as_fields(number: Number | None) -> dict[str, Any]:
  if number is None:
    return {"ours": None, "interval": None, "samples": 0}
  return {
    "ours": round(number.score, 2),
    "interval": [round(bound, 2) for bound in number.interval],
    "samples": number.samples,
  }


def _single_tasks(
  averages: Mapping[str, Average], tasks: Sequence[str]
) -> Iterator[Average]:
  """Yields each task as its own average, if there are several."""
  if len(tasks) > 1:
    yield from (Average(t, ((t,),)) for t in tasks if t not in averages)


def _matches(answer: Answer, candidate: Candidate, place: Place) -> bool:
  return (
    (answer.method, answer.budget) == (candidate.method, candidate.budget)
    and place.length in (None, answer.length)
    and place.turn in (None, answer.turn)
  )


def _our_order(
  compared: PaperComparison, names: Iterable[str], column: str
) -> str:
  """Lists names from best to worst; > only where the samples show it."""
  headline = next(iter(compared.averages.values()))

  def score(name: str) -> float:
    return compared.ours[Key(name, column, headline.name)].score

  ranked = sorted(names, key=lambda name: -score(name))
  text = ranked[0]
  for better, name in itertools.pairwise(ranked):
    answers = compared.answers[better, column]
    low, _ = intervals.difference(
      answers,
      compared.answers[name, column],
      headline.over({answer.task for answer in answers}).weights,
      headline.score,
    )
    text += f" {'>' if low > 0 else '='} {name}"
  return text


def _printed_order(scores: Mapping[str, float]) -> str:
  """Lists names by the paper's numbers, as in `a > b = c`."""
  ranked = sorted(scores, key=lambda name: -scores[name])
  text = ranked[0]
  for better, name in itertools.pairwise(ranked):
    text += f" {'>' if scores[better] > scores[name] else '='} {name}"
  return text
