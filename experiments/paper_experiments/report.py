"""Runs an experiment and tells what it came to, beside the paper."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.console

from experiments import reports
from experiments.paper_experiments import beside, catalogue, running
from experiments.paper_experiments.records import (
  Analysis,
  Comparison,
  Experiment,
  Program,
)
from experiments.paper_experiments.running import Session
from experiments.reporting import formats
from experiments.reporting.formats import Table


class _Report:
  """Text that goes to a terminal and, as Markdown, into a file."""

  def __init__(self, console: rich.console.Console):
    self._console = console
    self._parts: list[str] = []

  def title(self, text: str) -> None:
    self._console.print(f"\n{text}", style="bold", markup=False)
    self._parts.append(f"# {formats.escaped(text)}")

  def say(self, text: str) -> None:
    self._console.print(text, markup=False)
    self._parts.append(formats.escaped(text))

  def show(self, table: Table) -> None:
    self._console.print(table)
    self._parts.append(formats.to_markdown(table).rstrip())

  def picture(self, name: str) -> None:
    self._parts.append(f"![{name}]({name})")

  def markdown(self) -> str:
    return "\n\n".join(self._parts) + "\n"


def run(
  experiment: Experiment,
  session: Session,
  folder: pathlib.Path,
  console: rich.console.Console,
) -> None:
  """Runs all parts, shows them, and writes paper.md and paper.json.

  Args:
    experiment: what is run.
    session: with what.
    folder: to write to.
    console: told as it goes.

  Raises:
    InputError: see `running`.
    SystemExit: a program of the experiment has failed, and said why.
  """
  report = _Report(console)
  report.title(f"{experiment.id} {experiment.paper}: {experiment.title}")
  reason = catalogue.why_not(experiment)
  if reason:
    report.say(f"This cannot be run. {reason}")
  data: list[dict[str, Any]] = []
  for part in () if reason else experiment.parts:
    if isinstance(part, Program):
      code = running.call(part, session, folder)
      if code:
        raise SystemExit(code)
      continue
    report.say(circumstances(experiment, part, session))
    if isinstance(part, Analysis):
      data += _analysis(part, session, folder, report)
    else:
      data += _comparison(part, session, folder, report)
  for claim in experiment.claims:
    report.say(f"The paper: {claim}")
  for remark in experiment.remarks:
    report.say(remark)
  if reason:
    return
  folder.mkdir(parents=True, exist_ok=True)
  reports.write_text(folder / "paper.md", report.markdown())
  text = json.dumps(data, indent=2, ensure_ascii=False)
  reports.write_text(folder / "paper.json", f"{text}\n")
  console.print(f"Written to {folder / 'paper.md'}", markup=False)


def circumstances(
  experiment: Experiment, part: Comparison | Analysis, session: Session
) -> str:
  """Whose model and data these are, and what may be compared."""
  model = session.settings.model
  ran = f"The paper ran {experiment.models}"
  if experiment.needs:
    ran += f" and used {experiment.needs}"
  if running.scale_of(part, session.own_model, session.sources) == "paper":
    return (
      f"{model}. {ran}; numbers may be compared where model and data are the "
      "same."
    )
  whose = "data" if session.own_model else "model"
  return (
    f"{model} on generated data: not the paper's {whose}; orders may be "
    f"compared, numbers not. {ran}."
  )


def _comparison(
  part: Comparison, session: Session, folder: pathlib.Path, report: _Report
) -> Sequence[dict[str, Any]]:
  compared = running.compare(part, session, folder)
  if compared is None:
    report.say(f"{part.name} is left out: only the paper's models reach it.")
    return []
  found = compared.found
  for table in beside.tables(found):
    report.show(table)
  for line in beside.orders(found):
    report.say(line)
  report.say(beside.methods(found))
  if found.scale == "small" and part.scaling:
    report.say(part.scaling)
  doubts = {
    f"{line}?: {why}."
    for targets in part.targets
    for line, why in targets.doubts.items()
  }
  for text in [*sorted(doubts), *compared.notes]:
    report.say(text)
  return [{"part": part.name, **cell} for cell in beside.as_data(found)]


def _analysis(
  part: Analysis, session: Session, folder: pathlib.Path, report: _Report
) -> Sequence[dict[str, Any]]:
  found = running.analyse(part, session, folder)
  for table in found.tables:
    report.show(table)
  for note in found.notes:
    report.say(note)
  for name in found.pictures:
    report.picture(name)
  return [
    {"part": part.name, "title": table.title}
    | {"header": list(table.header), "lines": [list(x) for x in table.lines]}
    for table in found.tables
  ]
