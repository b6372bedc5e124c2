"""Runs the parts of an experiment."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import kvjax
from kvjax.errors import InputError
from kvjax.experiments import inputs, reports, results, runs
from kvjax.experiments.benchmarks import longbench
from kvjax.experiments.candidates import FULL, Candidate, candidates
from kvjax.experiments.paper_experiments.compare_to_paper import (
  Cells,
  PaperComparison,
  compare_to_paper,
)
from kvjax.experiments.paper_experiments.findings import (
  Findings,
  Scale,
  Subject,
)
from kvjax.experiments.paper_experiments.records import (
  Analysis,
  Column,
  Comparison,
  Line,
  Setup,
)
from kvjax.experiments.paper_experiments.samples import Sources, draw, prompts
from kvjax.experiments.reporting import wording
from kvjax.experiments.reporting.pictures import png
from kvjax.models.pretrained import Pretrained


class Session(NamedTuple):
  """What all parts share.

  Attributes:
    lm: the model.
    devices: how many it runs on.
    own_model: whether the user has named it.
    settings: model, dtype and seed, as all answers share them.
    batch: contexts per prefill.
    sources: the user's data.
    samples: per task and length, in place of a setup's.
    length: of prompts, likewise.
  """

  lm: Pretrained
  devices: int
  own_model: bool
  settings: results.Settings
  batch: int
  sources: Sources
  samples: int | None = None
  length: int | None = None


class Compared(NamedTuple):
  """What a comparison has come to.

  Attributes:
    comparison: our numbers and the paper's.
    notes: what was left out, settings, and how long it took.
  """

  comparison: PaperComparison
  notes: Sequence[str]


def scale_of(
  part: Comparison | Analysis, own_model: bool, sources: Sources
) -> Scale:
  """The paper's only with a model of the user's, and with what it is asked."""
  missing = part.paper.benchmark == "longbench" and sources.data is None
  return "small" if missing or not own_model else "paper"


def setup_of(part: Comparison | Analysis, session: Session) -> Setup | None:
  """What a part asks, with what the user wants in its place.

  Raises:
    InputError: the part's columns are lengths, and the user names one.
  """
  scale = scale_of(part, session.own_model, session.sources)
  setup = part.setup(scale)
  if setup is None:
    return None
  if session.samples is not None:
    setup = dataclasses.replace(setup, samples=session.samples)
  if session.length is None:
    return setup
  if isinstance(part, Comparison):
    places = [column.at(scale) for column in part.columns]
    if any(place is not None and place.length for place in places):
      raise InputError(
        "--length does not go with an experiment that compares lengths; leave "
        "it out."
      )
  return dataclasses.replace(setup, lengths=(session.length,))


def compare(
  comparison: Comparison, session: Session, folder: pathlib.Path
) -> Compared | None:
  """Answers the comparison's samples into a folder, or goes on there.

  Returns:
    None where nothing stands in for the paper's setup.

  Raises:
    InputError: see `draw` and `runs.answer`.
  """
  began = time.monotonic()
  scale = scale_of(comparison, session.own_model, session.sources)
  setup = setup_of(comparison, session)
  if setup is None:
    return None
  seed = session.settings.seed
  setup, notes = within_context(setup, session)
  drawn = draw(setup, scale, session.lm, session.sources, seed)
  cells = cells_of(comparison, scale, setup)
  settings = dataclasses.replace(
    session.settings,
    benchmark=setup.benchmark,
    data=drawn.data,
    protocol=comparison.protocol,
    schedule=str(setup.schedule),
    heads=f"{comparison.heads} head",
  )
  own = folder / folder_name(f"{comparison.name} {setup.benchmark}")
  run = runs.answer(
    session.lm,
    session.devices,
    chosen(cells),
    drawn.samples,
    settings,
    own,
    session.batch,
    began,
  )
  run.summary["about"] = dict(drawn.about)
  reports.write_run(own, run.summary)
  found = compare_to_paper(comparison, scale, cells, run.summary["rows"])
  notes += [
    *drawn.notes,
    f"{wording.title(run.summary)}. {wording.circumstances(run.summary)}",
    f"{run}; all in {own}.",
  ]
  return Compared(found, notes)


def within_context(setup: Setup, session: Session) -> tuple[Setup, list[str]]:
  """Leaves out lengths that the model's context has no room for, and says so.

  LongBench's prompts are cut to what there is room for. Where there is room for
  no length, or the user has named one, all stay, to be refused; so they do
  where nothing is asked.
  """
  left = [n for n in setup.lengths if not _has_room(session.lm, n)]
  if not left or session.length is not None or not setup.tasks:
    return setup, []
  context = session.lm.config.geometry.max_positions
  longer = f"longer than the context of this model, {context} tokens"
  if setup.benchmark == "longbench":
    limit = longbench.usual_limit(context)
    note = f"Prompts are cut to {limit} tokens; the experiment's are {longer}."
    return dataclasses.replace(setup, lengths=(limit,)), [note]
  kept = tuple(n for n in setup.lengths if n not in left)
  if not kept:
    return setup, []
  note = (
    f"{', '.join(map(str, left))} tokens are left out: with the chat template "
    f"they are {longer}."
  )
  return dataclasses.replace(setup, lengths=kept), [note]


def analyze(
  analysis: Analysis, session: Session, folder: pathlib.Path
) -> Findings:
  """Measures, and writes the pictures."""
  scale = scale_of(analysis, session.own_model, session.sources)
  setup = setup_of(analysis, session)
  assert setup is not None
  setup, notes = within_context(setup, session)
  seed, sources = session.settings.seed, session.sources
  rows = prompts(setup, scale, session.lm, sources, seed)
  found = analysis.run(Subject(session.lm, rows, setup.lengths, scale, seed))
  found = found._replace(notes=[*notes, *found.notes])
  for name, figure in found.pictures.items():
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(png(figure))
  return found


def cells_of(comparison: Comparison, scale: Scale, setup: Setup) -> Cells:
  """The candidate of every line in every column that the setup has.

  Raises:
    InputError: a method is not defined for the schedule or the budget.
  """
  own = comparison.heads == "query"
  return {
    (line, column): _candidate(line, column, scale, setup, own)
    for line in comparison.lines
    for column in comparison.columns
  }


def chosen(cells: Cells) -> list[Candidate]:
  """The candidates of all cells, each once, the full cache first."""
  found: dict[tuple[str, str], Candidate] = {}
  for candidate in cells.values():
    if candidate is not None:
      found[candidate.method, candidate.budget] = candidate
  return sorted(found.values(), key=lambda candidate: candidate.method != FULL)


def folder_name(name: str) -> str:
  """A part's name as a folder's."""
  return name.lower().replace(",", "").replace(" ", "_")


def _candidate(
  line: Line,
  column: Column,
  scale: Scale,
  setup: Setup,
  own: bool,
) -> Candidate | None:
  way, place = line.at(scale), column.at(scale)
  if way is None or place is None:
    return None
  if place.length not in (None, *setup.lengths):
    return None
  budget = way.budget or place.budget or kvjax.Retention(1.0)
  return candidates([way.method], [budget], setup.schedule, own)[-1]


def _has_room(lm: Pretrained, length: int) -> bool:
  try:
    inputs.check_lengths(lm, [length])
  except InputError:
    return False
  return True
