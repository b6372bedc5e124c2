"""A run: candidates answer samples into a folder, under a progress bar."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import rich.console
import rich.progress

from experiments import comparison, reports, results, summaries
from experiments.calibration.records import AUTO
from experiments.candidates import Candidate
from models.pretrained import Pretrained


class Run(NamedTuple):
  """What a run has come to.

  Attributes:
    summary: what summary.json holds.
    new: answers that are new.
    old: answers that the folder held before.
  """

  summary: dict[str, Any]
  new: int
  old: int

  def __str__(self) -> str:
    seconds = self.summary["seconds"]
    return (
      f"{self.new} answers in {seconds['total']:.0f} s (prefill "
      f"{seconds['prefill']:.0f} s, answers {seconds['answer']:.0f} s), "
      f"{self.old} from before"
    )


def answer(
  lm: Pretrained,
  devices: int,
  chosen: Sequence[Candidate],
  samples: results.Samples,
  settings: results.Settings,
  folder: pathlib.Path,
  batch: int,
  began: float,
) -> Run:
  """Answers what the folder does not hold yet, and sums everything up.

  Args:
    lm: the model.
    devices: how many it runs on.
    chosen: methods and budgets.
    samples: what is asked.
    settings: what the answers share.
    folder: of the run.
    batch: contexts per prefill.
    began: when the program started, by `time.monotonic`.

  Raises:
    InputError: see `Results` and `comparison.compare`.
  """
  store = results.Results(folder, settings)
  wanted = comparison.wanted(chosen, samples)
  new = len(set(wanted) - store.answers.keys())
  seconds = _answer(lm, chosen, samples, store, batch, new)
  seconds["total"] = time.monotonic() - began
  # Answers of earlier runs with other methods or samples stand beside them,
  # but not those of another calibration.
  order = {key: place for place, key in enumerate(wanted)}
  answers = sorted(
    (
      answer
      for answer in store.answers.values()
      if answer.key in order or not answer.budget.startswith(AUTO)
    ),
    key=lambda answer: order.get(answer.key, len(order)),
  )
  summary = dataclasses.asdict(settings) | {
    "decoding": "greedy",
    "device": reports.device(devices),
    "versions": reports.versions(),
    "seconds": {name: round(value, 1) for name, value in seconds.items()},
    "rows": summaries.summarize(answers, settings.protocol),
  }
  return Run(summary, new, len(wanted) - new)


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str, int], None]]:
  """A bar on stderr; yields what tells it of a task and of what is new."""
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description:15}"),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TextColumn("left"),
    rich.progress.TimeRemainingColumn(),
    console=rich.console.Console(stderr=True),
  ) as progress:
    bar = progress.add_task("compiling", total=total)

    def advance(task: str, count: int) -> None:
      progress.update(bar, description=task, advance=count)

    yield advance


def _answer(
  lm: Pretrained,
  chosen: Sequence[Candidate],
  samples: results.Samples,
  store: results.Results,
  batch: int,
  new: int,
) -> dict[str, float]:
  """Answers under a progress bar; the seconds that the parts took."""
  with progress_bar(new) as advance:
    seconds = comparison.compare(
      lm, chosen, samples, store, batch, advance, store.settings.protocol
    )
  return dataclasses.asdict(seconds)
