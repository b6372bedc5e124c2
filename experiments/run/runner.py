"""Runs candidates on samples into a folder, with a progress bar."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from kvjax.experiments.report import wording
from kvjax.experiments.run import (
  comparison,
  environment,
  estimate,
  forecast,
  multihost,
  results,
  summaries,
)
from kvjax.experiments.run.answering import Seconds
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.processes import Processes
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.run.prompting import QUERY_AWARE, Protocol
from kvjax.experiments.run.results import Answer, Key
from kvjax.experiments.tasks.sample import in_words
from kvjax.models.pretrained import Pretrained


class Run(NamedTuple):
  """The result of a run.

  Attributes:
    summary: content of summary.json.
    answers: answers to the samples, without others in the folder.
    new: number of new answers.
    old: number of answers that the folder already had.
    seconds: time of the new answers by phase.
  """

  summary: dict[str, Any]
  answers: Sequence[Answer]
  new: int
  old: int
  seconds: Mapping[str, float]

  def __str__(self) -> str:
    return (
      f"{wording.count(self.new, 'answer')} in {self.seconds['total']:.0f} s "
      f"(prefill {self.seconds['prefill']:.0f} s, answers "
      f"{self.seconds['answer']:.0f} s), {self.old} from before"
    )


class Job(NamedTuple):
  """What a run answers.

  Attributes:
    lm: the model.
    devices: number of its devices.
    chosen: methods and budgets.
    samples: the samples.
    settings: the settings that the answers share.
    folder: folder of the run.
    batch: contexts per prefill.
  """

  lm: Pretrained
  devices: int
  chosen: Sequence[Candidate]
  samples: results.Samples
  settings: results.Settings
  folder: pathlib.Path
  batch: int


def answer(job: Job, began: float) -> Run:
  """Generates the answers that the folder lacks, and summarizes all.

  Args:
    job: what is answered.
    began: start of the program, by `time.monotonic`.

  Raises:
    InputError: hosts have other files, or see `Results`, `Processes` and
      `comparison.pending`.
  """
  lm, devices, chosen, samples, settings, folder, batch = job
  wanted = comparison.wanted(chosen, samples)
  comparison.check_hosts(settings, wanted)
  store = results.Results(folder, settings)
  work = comparison.pending(
    lm, chosen, samples, store, batch, settings.protocol
  )
  spent = Seconds()
  processes = Processes(
    folder,
    environment.device(devices),
    began,
    lambda: dataclasses.asdict(spent),
  )
  new = len(work.missing)
  doing = "compiling" if new else "nothing is new"
  logging.info("%s has %d answers already", folder, len(store.records))
  _announce(lm, work)
  with progress_bar(new, doing) as advance:

    def on_answers(task: str, count: int) -> None:
      advance(task, count)
      processes.note()

    comparison.answer_all(lm, work, store, on_answers, spent)
  first_from_full = first_token_from_full_prompt(settings.protocol, chosen)
  summary = dataclasses.asdict(settings) | {
    "decoding": _decoding(samples),
    **processes.summary(),
    "rows": summaries.summarize(_sort_answers(store, wanted), first_from_full),
  }
  answers = [store.records[key] for key in dict.fromkeys(wanted)]
  if not first_from_full:
    answers = summaries.with_same_first_token(answers)
  return Run(summary, answers, new, len(wanted) - new, processes.seconds)


def foresee(job: Job) -> forecast.Forecast:
  """Says what `answer` would cost, and writes nothing."""
  lm, _, chosen, samples, settings, folder, batch = job
  comparison.check_hosts(settings, comparison.wanted(chosen, samples))
  store = results.Results(folder, settings)
  work = comparison.pending(
    lm, chosen, samples, store, batch, settings.protocol
  )
  # Before the measurement, which may take minutes.
  _announce(lm, work)
  with progress_bar(None, transient=True):
    return forecast.forecast(lm, work)


def _announce(lm: Pretrained, work: comparison.Work) -> None:
  """Says on stderr what is left to do, and about how long it takes."""
  if not work.missing:
    return
  expected = estimate.expected(forecast.estimate_of(lm, work))
  if multihost.is_first():
    print(f"{forecast.cost_of(work)} {expected}", file=sys.stderr, flush=True)


def _decoding(samples: results.Samples) -> str:
  """Says how answers are drawn, such as "greedy"."""
  ways = {sample.sampling for drawn in samples.values() for sample in drawn}
  return ", ".join(sorted(map(in_words, ways)))


def first_token_from_full_prompt(
  protocol: Protocol, chosen: Sequence[Candidate]
) -> bool:
  """Returns whether first answer tokens come from the uncompressed prompt.

  They do if the question is prefilled, unless a candidate prefills in blocks.
  """
  blocks = any(candidate.plan.schedule.block for candidate in chosen)
  return protocol == QUERY_AWARE and not blocks


def _sort_answers(
  store: results.Results, wanted: Sequence[Key]
) -> list[Answer]:
  """Sorts wanted answers first, followed by those of earlier runs.

  Earlier runs may have other methods, budgets and samples. Answers of a method
  and a budget that have been answered anew are left out, as after an edit of a
  plugin, or with another file or calibration.
  """
  rank = {key: place for place, key in enumerate(wanted)}
  known = [*(answer.key for answer in store.records.values()), *wanted]
  newest = {(key.method, key.budget): key.options for key in known}
  return sorted(
    (
      answer
      for answer in store.records.values()
      if answer.options == newest[answer.method, answer.budget]
    ),
    key=lambda answer: rank.get(answer.key, len(rank)),
  )
