"""Runs the parts of an experiment."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.benchmarks.base import Drawn
from kvjax.experiments.benchmarks.longbench import reader
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.papers.compare_to_paper import (
  Cells,
  PaperComparison,
  compare_to_paper,
)
from kvjax.experiments.papers.data_model import (
  FROM_FILES,
  Analysis,
  Column,
  Comparison,
  Line,
  Setup,
)
from kvjax.experiments.papers.findings import Findings, Scale, Subject
from kvjax.experiments.papers.setup_samples import Sources, draw, prompts
from kvjax.experiments.report import run_files, wording, writing
from kvjax.experiments.report.pictures import png
from kvjax.experiments.run import multihost, outputs, results, runner
from kvjax.experiments.run.candidates import FULL, Candidate, candidates
from kvjax.experiments.run.forecast import Forecast
from kvjax.experiments.tasks import passkey, suite
from kvjax.models.pretrained import Pretrained


class Session(NamedTuple):
  """The model, data and settings that all parts share.

  Attributes:
    lm: the model.
    devices: number of its devices.
    own_model: whether the user chose the model.
    settings: model, dtype and seed, as all answers share them.
    batch: contexts per prefill.
    sources: the user's data.
    samples: samples per task and length, instead of the setup's.
    length: prompt length, instead of the setup's.
    tasks: the only tasks to run, if not all of the setup.
  """

  lm: Pretrained
  devices: int
  own_model: bool
  settings: results.Settings
  batch: int
  sources: Sources
  samples: int | None = None
  length: int | None = None
  tasks: Sequence[str] | None = None


class _Planned(NamedTuple):
  """A comparison that is ready to run.

  Attributes:
    scale: its scale.
    cells: the candidate of every cell.
    drawn: its samples.
    job: what it answers.
    notes: what was left out.
  """

  scale: Scale
  cells: Cells
  drawn: Drawn
  job: runner.Job
  notes: list[str]


def scale_of(
  part: Comparison | Analysis, own_model: bool, sources: Sources
) -> Scale:
  """Returns the paper's scale only if the user provides model and data."""
  missing = part.paper.benchmark in FROM_FILES and sources.data is None
  return "small" if missing or not own_model else "paper"


def scale_here(part: Comparison | Analysis, session: Session) -> Scale:
  """Returns `scale_of`, or the small scale for a model of a short context.

  An analysis is small if none of its lengths fits into the model's context.
  """
  scale = scale_of(part, session.own_model, session.sources)
  generated = part.paper.benchmark != "longbench" and part.paper.tasks
  if isinstance(part, Comparison) or session.length or not generated:
    return scale
  fits = any(_fits_context(session.lm, n) for n in part.paper.lengths)
  return scale if fits else "small"


def check(
  part: Comparison | Analysis,
  scale: Scale,
  tasks: Sequence[str] | None,
  length: int | None,
) -> None:
  """Rejects overrides that do not suit a part, before anything runs.

  Args:
    part: part of an experiment.
    scale: its scale, of `scale_of`.
    tasks: the only tasks to run, if not all.
    length: prompt length, if not the setup's.

  Raises:
    InputError: the part lacks a task, or it has a length and compares lengths
      or asks problems, whose length is their own.
  """
  setup = part.at(scale)
  if setup is None:
    return
  if tasks is not None and setup.tasks:
    suite.check_tasks(tasks, setup.tasks)
  if length is None or not isinstance(part, Comparison):
    return
  if setup.new_tokens is not None:
    raise InputError(
      "--length does not go with mathematical problems, which are as long as "
      "they are; leave it out."
    )
  places = [column.at(scale) for column in part.columns]
  if any(place is not None and place.length for place in places):
    raise InputError(
      "--length does not go with an experiment that compares lengths; leave it "
      "out."
    )


def setup_of(part: Comparison | Analysis, session: Session) -> Setup | None:
  """Returns the setup of a part, with the user's overrides.

  Raises:
    InputError: see `check`.
  """
  scale = scale_here(part, session)
  check(part, scale, session.tasks, session.length)
  setup = part.at(scale)
  if setup is None:
    return None
  if session.samples is not None:
    setup = dataclasses.replace(setup, samples=session.samples)
  if session.tasks is not None and setup.tasks:
    setup = dataclasses.replace(setup, tasks=tuple(session.tasks))
  lengths = setup.lengths
  if session.length is not None:
    lengths = (session.length,)
  elif setup.in_words:
    count, essay = session.lm.text.count, session.sources.texts.essay
    lengths = tuple(passkey.length_of_words(n, count, essay) for n in lengths)
  return dataclasses.replace(setup, lengths=lengths, in_words=False)


def compare(
  comparison: Comparison, session: Session, folder: pathlib.Path
) -> tuple[PaperComparison, list[str]] | None:
  """Runs the comparison's samples into a folder, or resumes there.

  Returns:
    Our numbers and the paper's, and notes: what was left out, settings, and how
    long it took. None if it is left out; see `why_left_out`.

  Raises:
    InputError: see `draw` and `runner.answer`.
  """
  began = time.monotonic()
  planned = _plan(comparison, session, folder)
  if planned is None:
    return None
  run = runner.answer(planned.job, began)
  earlier = run_files.notes(planned.job.folder)
  run.summary["about"] = {**earlier, **planned.drawn.about}
  if multihost.is_first():
    writing.write_run(planned.job.folder, run.summary)
  compared = compare_to_paper(
    comparison, planned.scale, planned.cells, run.answers
  )
  notes = [
    *planned.notes,
    f"{wording.title(run.summary)}. {wording.circumstances(run.summary)}",
    f"{run}; all in {planned.job.folder}.",
  ]
  return compared, notes


def foresee(
  comparison: Comparison, session: Session, folder: pathlib.Path
) -> Forecast | None:
  """Says what `compare` would cost, and writes nothing; see there."""
  planned = _plan(comparison, session, folder)
  return None if planned is None else runner.foresee(planned.job)


def _plan(
  comparison: Comparison, session: Session, folder: pathlib.Path
) -> _Planned | None:
  """Draws the samples of a comparison; see `compare`."""
  scale = scale_of(comparison, session.own_model, session.sources)
  setup = setup_of(comparison, session)
  if setup is None or why_left_out(setup, session.lm):
    return None
  seed = session.settings.seed
  setup, notes = within_context(setup, session)
  drawn = draw(
    setup, scale, session.lm, session.sources, seed, comparison.protocol
  )
  settings = dataclasses.replace(
    session.settings,
    benchmark=setup.benchmark,
    data=drawn.data,
    protocol=comparison.protocol,
    schedule=str(setup.schedule),
    heads=f"{comparison.heads} head",
  )
  cells = cells_of(comparison, scale, setup, seed)
  job = runner.Job(
    session.lm,
    session.devices,
    chosen(cells),
    drawn.samples,
    settings,
    folder / folder_name(f"{comparison.name} {setup.benchmark}"),
    session.batch,
  )
  return _Planned(scale, cells, drawn, job, [*notes, *drawn.notes])


def why_left_out(setup: Setup | None, lm: Pretrained) -> str | None:
  """Says why a comparison does not run, if it does not.

  Args:
    setup: its setup, if it has one here.
    lm: the model.
  """
  if setup is None:
    return "only the paper's models reach it"
  new_tokens = setup.new_tokens
  if new_tokens is None or _fits_context(lm, new_tokens):
    return None
  return (
    f"with the chat template, answers of {new_tokens} tokens are {_longer(lm)}"
  )


def _longer(lm: Pretrained) -> str:
  context = lm.model.geometry.max_positions
  return f"longer than the context of this model, {context} tokens"


def within_context(setup: Setup, session: Session) -> tuple[Setup, list[str]]:
  """Drops lengths that exceed the model's context, with a note.

  LongBench's prompts are truncated instead. If no length fits, or the user
  chose one, all remain and are rejected later. They also remain if there are no
  tasks.
  """
  too_long = [n for n in setup.lengths if not _fits_context(session.lm, n)]
  if not too_long or session.length is not None or not setup.tasks:
    return setup, []
  longer = _longer(session.lm)
  if setup.benchmark == "longbench":
    limit = reader.usual_limit(session.lm.model.geometry.max_positions)
    note = f"Prompts are cut to {limit} tokens; the experiment's are {longer}."
    return dataclasses.replace(setup, lengths=(limit,)), [note]
  kept = tuple(n for n in setup.lengths if n not in too_long)
  if not kept:
    return setup, []
  note = (
    f"{', '.join(map(str, too_long))} tokens are left out: with the chat "
    f"template they are {longer}."
  )
  return dataclasses.replace(setup, lengths=kept), [note]


def analyze(
  analysis: Analysis, session: Session, folder: pathlib.Path
) -> Findings:
  """Runs an analysis and writes its plots."""
  subject, notes = subject_of(analysis, session)
  findings = analysis.run(subject)
  findings = findings._replace(notes=[*notes, *findings.notes])
  for name, figure in findings.pictures.items():
    outputs.write_bytes(folder / name, png(figure))
  return findings


def subject_of(
  analysis: Analysis, session: Session
) -> tuple[Subject, list[str]]:
  """Draws the prompts of an analysis; returns notes on what is left out."""
  scale = scale_here(analysis, session)
  setup = setup_of(analysis, session)
  assert setup is not None
  setup, notes = within_context(setup, session)
  seed, sources = session.settings.seed, session.sources
  rows = prompts(setup, scale, session.lm, sources, seed)
  return Subject(session.lm, rows, setup.lengths, scale, seed), notes


def cells_of(
  comparison: Comparison, scale: Scale, setup: Setup, seed: int = 0
) -> Cells:
  """Builds the candidate of every cell that the setup includes.

  Args:
    comparison: the comparison.
    scale: the scale of the setup.
    setup: the setup.
    seed: seed of random methods and sketches.

  Raises:
    InputError: a method is not defined for the schedule or the budget.
  """

  def candidate(line: Line, column: Column) -> Candidate | None:
    way, place = line.at(scale), column.at(scale)
    if way is None or place is None:
      return None
    if place.length not in (None, *setup.lengths):
      return None
    budget = way.budget or place.budget or kvjax.Retention(1.0)
    return candidates(
      [way.method],
      [budget],
      setup.schedule,
      per_query_head=comparison.heads == "query",
      seed=seed,
    )[-1]

  return {
    (line, column): candidate(line, column)
    for line in comparison.lines
    for column in comparison.columns
  }


def chosen(cells: Cells) -> list[Candidate]:
  """Lists the distinct candidates of all cells, the full cache first."""
  distinct = {(c.method, c.budget): c for c in cells.values() if c is not None}
  return sorted(distinct.values(), key=lambda each: each.method != FULL)


def folder_name(name: str) -> str:
  """Converts the name of a part to a folder name."""
  return name.lower().replace(",", "").replace(" ", "_")


def _fits_context(lm: Pretrained, length: int) -> bool:
  try:
    run_inputs.check_lengths(lm, [length])
  except InputError:
    return False
  return True
