"""A run: candidates answer samples into a folder, under a progress bar."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import rich.console
import rich.progress

from kvjax.experiments import comparison, reports, results, summaries
from kvjax.experiments.answering import QUERY_AWARE, Protocol, Seconds
from kvjax.experiments.calibration.records import AUTO
from kvjax.experiments.candidates import Candidate
from kvjax.experiments.processes import Process, Processes
from kvjax.experiments.reporting import wording
from kvjax.experiments.results import Answer, Key
from kvjax.models.pretrained import Pretrained


class Run(NamedTuple):
  """What a run has come to.

  Attributes:
    summary: what summary.json holds.
    new: answers that are new.
    old: answers that the folder held before.
    seconds: that the new ones have taken, by what they were spent on.
  """

  summary: dict[str, Any]
  new: int
  old: int
  seconds: Mapping[str, float]

  def __str__(self) -> str:
    return (
      f"{wording.count(self.new, 'answer')} in {self.seconds['total']:.0f} s "
      f"(prefill {self.seconds['prefill']:.0f} s, answers "
      f"{self.seconds['answer']:.0f} s), {self.old} from before"
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
    InputError: see `Results`, `Processes` and `comparison.compare`.
  """
  store = results.Results(folder, settings)
  processes = Processes(folder)
  wanted = comparison.wanted(chosen, samples)
  new = len(set(wanted) - store.answers.keys())
  device, versions = reports.device(devices), reports.versions()
  spent = Seconds()

  def process() -> Process:
    total = time.monotonic() - began
    return Process(
      device, versions, dataclasses.asdict(spent) | {"total": total}
    )

  doing = "compiling" if new else "nothing is new"
  with progress_bar(new, doing) as advance:

    def on_answers(task: str, count: int) -> None:
      advance(task, count)
      processes.note(process())

    comparison.compare(
      lm, chosen, samples, store, batch, on_answers, settings.protocol, spent
    )
  own = process()
  uncut = first_is_uncut(settings.protocol, chosen)
  summary = dataclasses.asdict(settings) | {
    "decoding": "greedy",
    **processes.summary(own, answered=new > 0),
    "rows": summaries.summarize(_shown(store, wanted), uncut),
  }
  return Run(summary, new, len(wanted) - new, own.seconds)


def first_is_uncut(protocol: Protocol, chosen: Sequence[Candidate]) -> bool:
  """Whether all see the whole prompt when they choose an answer's first token.

  Where the question is prefilled too they do, but for what works in blocks.
  """
  blocks = any(candidate.plan.schedule.block for candidate in chosen)
  return protocol == QUERY_AWARE and not blocks


@contextlib.contextmanager
def progress_bar(
  total: int | None, doing: str = "compiling", transient: bool = False
) -> Iterator[Callable[[str, int], None]]:
  """A bar on stderr; yields what tells it of a task and of what is new.

  Args:
    total: of what is to come, if that is known.
    doing: what it says before it is told of a task.
    transient: whether it goes in the end, and is for terminals alone.
  """
  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description:15}"),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TextColumn("left"),
    rich.progress.TimeRemainingColumn(),
    console=console,
    transient=transient,
    disable=transient and not console.is_interactive,
  ) as progress:
    bar = progress.add_task(doing, total=total)

    def advance(task: str, count: int) -> None:
      progress.update(bar, description=task, advance=count)

    yield advance


def _shown(store: results.Results, wanted: Sequence[Key]) -> list[Answer]:
  """What is wanted, in order, and what earlier runs have asked beside it.

  That is other methods and samples, but not those of another calibration.
  """
  order = {key: place for place, key in enumerate(wanted)}
  return sorted(
    (
      answer
      for answer in store.answers.values()
      if answer.key in order or not answer.budget.startswith(AUTO)
    ),
    key=lambda answer: order.get(answer.key, len(order)),
  )
