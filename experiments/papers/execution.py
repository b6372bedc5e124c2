"""Runs an experiment and reports the results next to the paper's."""

import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console

from kvjax.experiments.papers import (
  compare_to_paper,
  number_pictures,
  paper_tables,
  programs,
  running,
)
from kvjax.experiments.papers.data_model import Analysis, Comparison, Experiment
from kvjax.experiments.papers.findings import Findings, Scale
from kvjax.experiments.papers.running import Session
from kvjax.experiments.report import formats, wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.pictures import png
from kvjax.experiments.run import children, environment, outputs, sending
from kvjax.experiments.run.progress_bar import progress_bar

# A line per cell or table, for other programs.
_Data = list[dict[str, Any]]


class _Report:
  """A report that goes to the terminal and, as Markdown, to a file."""

  def __init__(self, experiment: Experiment, console: rich.console.Console):
    self._console = console
    text = f"{experiment.id} {experiment.paper}: {experiment.title}"
    self._console.print(f"\n{text}", style="bold", markup=False)
    self._parts: list[str | Table] = [f"# {formats.escaped(text)}"]

  def say(self, text: str, soft_wrap: bool = False) -> None:
    text = sending.named(text)
    self._console.print(text, markup=False, soft_wrap=soft_wrap)
    self._parts.append(formats.escaped(text))

  def say_command(self, before: str, arguments: Sequence[str]) -> None:
    """Says a line that a shell takes, without breaks."""
    self.say(before + shlex.join(arguments), soft_wrap=True)

  def say_once(self, text: str) -> None:
    if formats.escaped(text) not in self._parts:
      self.say(text)

  def show(self, table: Table) -> None:
    self._console.print(table)
    self._parts.append(table)

  def picture(self, name: str) -> None:
    self._parts.append(f"![{name}]({name})")

  def conclude(
    self, experiment: Experiment, folder: pathlib.Path, data: _Data
  ) -> None:
    """Quotes the paper, and writes paper.md and paper.json."""
    self.quote(experiment)
    outputs.write_text(folder / "paper.md", formats.document(*self._parts))
    outputs.write_json(folder / "paper.json", data)
    said = sending.named(f"Written to {folder / 'paper.md'}")
    self._console.print(said, markup=False, soft_wrap=True)

  def say_minutes(self, experiment: Experiment) -> None:
    minutes = wording.count(experiment.minutes, "minute")
    self.say(f"With the bundled model: about {minutes} on two cores.")

  def quote(self, experiment: Experiment) -> None:
    for claim in experiment.claims:
      self.say(f"The paper: {claim}")
    for remark in experiment.remarks:
      self.say(remark)


def refuse(experiment: Experiment, console: rich.console.Console) -> None:
  """Reports why an experiment cannot run, and quotes the paper."""
  report = _Report(experiment, console)
  report.say(f"This cannot be run. {experiment.why_not}")
  report.quote(experiment)


def call(
  experiment: Experiment,
  model: str,
  given: Mapping[str, str],
  folder: pathlib.Path,
  console: rich.console.Console,
) -> None:
  """Runs the programs of an experiment and records their commands.

  Args:
    experiment: an experiment whose parts are all programs.
    model: name of the model.
    given: the user's flags by name.
    folder: output folder.
    console: for progress output.

  Raises:
    SystemExit: a program failed, with its own message.
  """
  report = _Report(experiment, console)
  own_model = "model" in given
  complete = own_model and (
    "LongBench" not in experiment.needs or "data" in given
  )
  runs = any("model" in program.takes for program in experiment.programs)
  scale: Scale = "paper" if complete else "small"
  report.say(
    circumstances(experiment, model if runs else None, own_model, scale)
  )
  data: _Data = []
  for program in programs.chosen(experiment.programs, given):
    module, *arguments = programs.command(program, folder, given)
    command = [module, *arguments]
    report.say_command("python -m ", command)
    children.run_or_exit(module, arguments)
    data.append({"part": program.name, "command": shlex.join(command)})
  report.conclude(experiment, folder, data)


def foresee_call(
  experiment: Experiment,
  given: Mapping[str, str],
  folder: pathlib.Path,
  console: rich.console.Console,
) -> None:
  """Says which programs an experiment would run, and what they cost.

  What a program costs that reads what another one writes is not said.

  Args:
    experiment: an experiment whose parts are all programs.
    given: the user's flags by name.
    folder: output folder.
    console: for the commands.

  Raises:
    SystemExit: a program refused its flags, with its own message.
  """
  report = _Report(experiment, console)
  report.say_minutes(experiment)
  for program in programs.chosen(experiment.programs, given):
    module, *arguments = programs.command(program, folder, given)
    report.say_command("It would run python -m ", [module, *arguments])
    if programs.has_dry_run(program):
      children.run_or_exit(module, [*arguments, "--dry_run"])


def foresee(
  experiment: Experiment,
  session: Session,
  folder: pathlib.Path,
  console: rich.console.Console,
) -> None:
  """Says what `run` would cost, and writes nothing; arguments as there."""
  report = _Report(experiment, console)
  report.say_minutes(experiment)
  for part in experiment.parts:
    if isinstance(part, Analysis):
      subject, _ = running.subject_of(part, session)
      about = subject.described if subject.rows else "random data"
      report.say(f"{part.name}: {about}")
      continue
    assert isinstance(part, Comparison)
    forecast = running.foresee(part, session, folder)
    report.say(f"{part.name}:" if forecast else left_out(part, session))
    if forecast:
      console.print(forecast)


def left_out(part: Comparison, session: Session) -> str:
  """Says why a comparison does not run."""
  setup = running.setup_of(part, session)
  why = running.why_left_out(setup, session.lm)
  return f"{part.name} is left out: {why}."


def run(
  experiment: Experiment,
  session: Session,
  folder: pathlib.Path,
  console: rich.console.Console,
) -> None:
  """Runs all parts, shows them, and writes paper.md and paper.json.

  Raises:
    InputError: see `running`.
  """
  report = _Report(experiment, console)
  data: _Data = []
  for part in experiment.parts:
    assert isinstance(part, Analysis | Comparison)
    scale = running.scale_here(part, session)
    runs = isinstance(part, Comparison) or part.model
    model = session.settings.model if runs else None
    report.say_once(circumstances(experiment, model, session.own_model, scale))
    if isinstance(part, Comparison):
      data += _comparison(part, session, folder, report)
    else:
      with progress_bar(None, f"measuring {part.name}", transient=True):
        findings = running.analyze(part, session, folder)
      data += _analysis(part, findings, session, report)
  report.conclude(experiment, folder, data)


def circumstances(
  experiment: Experiment, model: str | None, own_model: bool, scale: Scale
) -> str:
  """Describes the model and data, and what may be compared.

  Args:
    experiment: the experiment.
    model: name of the model; None if no model runs.
    own_model: whether the user chose the model.
    scale: scale of the experiment.
  """
  ran = f"The paper ran {experiment.models}"
  if experiment.needs:
    ran += f" and used {experiment.needs}"
  if model is None:
    return f"No model runs; the data are drawn at random. {ran}."
  if scale == "paper":
    return (
      f"{model}. {ran}; numbers may be compared where model and data are the "
      "same."
    )
  whose = "data" if own_model else "model"
  return (
    f"{model} on generated data: not the paper's {whose}; its numbers are not "
    f"to be compared. {ran}."
  )


def _comparison(
  part: Comparison, session: Session, folder: pathlib.Path, report: _Report
) -> _Data:
  result = running.compare(part, session, folder)
  if result is None:
    report.say(left_out(part, session))
    return []
  compared, notes = result
  for table in paper_tables.tables(compared):
    report.show(table)
  for name, figure in number_pictures.draw(compared).items():
    file = f"{running.folder_name(part.name)}_{name}.png"
    outputs.write_bytes(folder / file, png(figure))
    report.picture(file)
  orders = compare_to_paper.orders(compared)
  for line in orders:
    report.say(line)
  if any(">" in line for line in orders):
    report.say(compare_to_paper.MEANING)
  report.say(compare_to_paper.methods(compared))
  if compared.scale == "small" and part.scaling:
    report.say(part.scaling)
  doubts = {
    f"{line}?: {why}."
    for targets in part.targets
    for line, why in targets.doubts.items()
  }
  for text in [*sorted(doubts), *notes]:
    report.say(text)
  return [
    {"part": part.name, **cell} for cell in compare_to_paper.as_data(compared)
  ]


def _analysis(
  part: Analysis, findings: Findings, session: Session, report: _Report
) -> _Data:
  for table in findings.tables:
    report.show(table)
  for name in findings.pictures:
    report.picture(name)
  settings = session.settings
  # Every host measures alone, and the first one reports.
  device = environment.local_device(session.devices)
  versions = wording.versions(environment.versions())
  how = f"Seed {settings.seed}, {settings.dtype} on {device}; {versions}."
  for note in [*findings.notes, how]:
    report.say(note)
  return [
    {"part": part.name, "title": table.title}
    | {"header": list(table.header), "lines": [list(x) for x in table.lines]}
    for table in findings.tables
  ]
