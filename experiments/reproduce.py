"""Repeats the experiments of five papers.

  kvjax reproduce

lists them, and

  kvjax reproduce E5.1 --model=DIR --data=DIR

runs one or more of them on your model and data: files of LongBench, of MATH-500
for E2.14, or of RULER if it should not be generated. Without model and data,
the bundled model answers generated prompts at scaled-down budgets. It is not
the papers' model: do not compare the numbers. Orders of methods are shown as
far as the samples decide them.

--dry_run says what the experiments would cost: contexts, tokens, bytes, and
minutes from two contexts. With the bundled model, an experiment takes 1 to 15
minutes on two cores; the list has those of each.

The output is results/papers/ID/MODEL/paper.md and paper.json, and a folder with
all answers for each run. An interrupted run resumes where it stopped. With
`--multihost`, hosts that run the same command share the contexts.
"""

import pathlib
from collections.abc import Mapping, Sequence

import rich.box
import rich.console
import rich.table
from absl import flags

from kvjax import addresses
from kvjax.calibration.curve import check_tau
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.inputs import (
  dry_run_inputs,
  host_inputs,
  run_inputs,
  text_inputs,
)
from kvjax.experiments.papers import execution, programs, registry, running
from kvjax.experiments.papers.data_model import (
  FROM_FILES,
  Analysis,
  Experiment,
  Program,
)
from kvjax.experiments.papers.setup_samples import Sources
from kvjax.experiments.run import multihost, outputs, sending

flags.set_default(run_inputs.MODEL, run_inputs.REFERENCE)
for module in (dry_run_inputs, host_inputs, run_inputs, text_inputs):
  flags.adopt_module_key_flags(module)

_DATA = flags.DEFINE_string(
  "data",
  None,
  "File or folder with published samples of LongBench, RULER or MATH-500, or "
  "the name of such a dataset on the Hugging Face hub.",
)
_SAMPLES = flags.DEFINE_integer(
  "samples",
  None,
  "Samples per task and length, and depth or round; the default is the paper's "
  "number, or a few without its model.",
  lower_bound=1,
  upper_bound=run_inputs.MOST_SAMPLES,
)
_TASKS = flags.DEFINE_list(
  "tasks",
  None,
  "Only these of the experiment's tasks or datasets; for E3.5 to E3.7, tasks "
  "of RULER to calibrate on.",
)
_TAU = flags.DEFINE_float(
  "tau",
  None,
  "Share of quality that E3.5 to E3.7 preserve; the default is the paper's.",
)
_TRIALS = flags.DEFINE_bool(
  "trials",
  False,
  "Also repeats E3.6 and E3.7 on LongBench in 20 trials with other sketches.",
)
_LENGTH = flags.DEFINE_integer(
  "length",
  None,
  "Tokens of prompt and answer instead of the experiment's; for LongBench, the "
  "maximum prompt length.",
  lower_bound=1,
)
_OUTPUT = flags.DEFINE_string(
  "output",
  "results/papers",
  "Parent folder of the experiment folders, or its address.",
)


def main(ids: Sequence[str]) -> None:
  """Lists all experiments, or runs the given ones."""
  console = host_inputs.console()
  if not ids:
    console.print(_listed())
    return
  chosen = registry.find(ids)
  given = _given()
  if "data" in given and "model" not in given:
    raise InputError(
      "--data needs a --model that can answer it; the bundled one answers "
      "needle questions only."
    )
  data = None if _DATA.value is None else hub.resolve(_DATA.value)
  sources = Sources(data, text_inputs.texts())
  _check_overrides(chosen, given, sources)
  _check_hosts(chosen)
  dry = dry_run_inputs.DRY_RUN.value
  _check_output(chosen)
  outputs.check_run(_OUTPUT.value, writes=not dry)
  for experiment in chosen:
    if experiment.why_not:
      execution.refuse(experiment, console)
  # Run programs before loading the model: a device rarely fits two models.
  for experiment in chosen:
    if experiment.programs and dry:
      execution.foresee_call(experiment, given, _folder(experiment), console)
    elif experiment.programs:
      name, folder = run_inputs.model_name(), _folder(experiment)
      execution.call(experiment, name, given, folder, console)
  remaining = [e for e in chosen if e.parts and not e.programs]
  if not remaining:
    return
  with run_inputs.loaded() as (lm, devices):
    session = running.Session(
      lm,
      devices,
      "model" in given,
      run_inputs.settings(),
      run_inputs.batch(),
      sources,
      _SAMPLES.value,
      _LENGTH.value,
      _TASKS.value,
    )
    run = execution.foresee if dry else execution.run
    for experiment in remaining:
      run(experiment, session, _folder(experiment), console)
      sending.send_if_due(now=True)


def _listed() -> rich.console.Group:
  """Lists the experiments, in a table per paper."""
  papers = dict.fromkeys(e.paper for e in registry.EXPERIMENTS.values())
  return rich.console.Group(
    *map(_table, papers),
    "kvjax reproduce ID runs one; --model=DIR takes your model and --data=DIR "
    "LongBench's files. The minutes are for the bundled model and generated "
    "prompts on two cores.",
  )


def _table(paper: str) -> rich.table.Table:
  experiments = [e for e in registry.EXPERIMENTS.values() if e.paper == paper]
  table = rich.table.Table(
    title=f"{paper}: {experiments[0].models}",
    box=rich.box.SIMPLE_HEAD,
    pad_edge=False,
    padding=(0, 1, 0, 0),
    title_justify="left",
  )
  table.add_column("id", no_wrap=True)
  for name in ("shows", "data needed", "runs without model and data"):
    table.add_column(name)
  table.add_column("min", justify="right", no_wrap=True)
  for experiment in experiments:
    table.add_row(
      experiment.id,
      experiment.title,
      experiment.needs or "none",
      experiment.why_not or experiment.instead,
      "" if experiment.why_not else str(experiment.minutes),
    )
  return table


def _folder(experiment: Experiment) -> pathlib.Path:
  """Returns the folder of an experiment, or a copy; see `outputs.run_folder`.

  It is named after the model; a slash in a name of the hub becomes "--".
  """
  parent = f"{_OUTPUT.value.rstrip('/')}/{experiment.id}"
  return outputs.run_folder(parent, run_inputs.model_name().replace("/", "--"))


def _check_overrides(
  chosen: Sequence[Experiment], given: Mapping[str, str], sources: Sources
) -> None:
  """Rejects overrides before anything runs or is written."""
  if _TAU.value is not None:
    check_tau(_TAU.value)
    for experiment in chosen:
      if not any("tau" in each.takes for each in experiment.programs):
        raise InputError(f"--tau is for E3.5 to E3.7, not for {experiment.id}.")
  for name in sorted({"samples", "tasks", "length"} & given.keys()):
    for experiment in chosen:
      if experiment.parts and not _reads(experiment, name):
        raise InputError(
          f"{experiment.id} does not read --{name}; leave it out."
        )
  if _TRIALS.value:
    _check_trials(chosen, given)
  if sources.data is not None:
    _check_data(chosen)
  tasks = _TASKS.value
  for experiment in chosen:
    for part in experiment.parts:
      if not isinstance(part, Program):
        scale = running.scale_of(part, "model" in given, sources)
        running.check(part, scale, tasks, _LENGTH.value)
    called = programs.chosen(experiment.programs, given)
    if tasks is not None and any("tasks" in each.takes for each in called):
      generator.choose(tasks, sources.texts)


def _reads(experiment: Experiment, name: str) -> bool:
  """Says whether --samples, --tasks or --length changes an experiment."""
  return any(
    name in part.takes
    if isinstance(part, Program)
    # Random data have lengths, but are no samples of a task.
    else part.paper.tasks or name == "length"
    for part in experiment.parts
  )


def _check_data(chosen: Sequence[Experiment]) -> None:
  """Rejects experiments that one --data cannot serve."""
  reading: dict[str, str] = {}
  for experiment in chosen:
    for part in experiment.parts:
      if isinstance(part, Program):
        read = "longbench" if "data" in part.takes else ""
      else:
        read = part.paper.benchmark
      if read in FROM_FILES:
        reading.setdefault(read, experiment.id)
  if len(reading) > 1:
    each = " and ".join(f"{who} reads {what}" for what, who in reading.items())
    raise InputError(
      f"{each}, which one --data cannot be; run them one after the other, each "
      "with its own."
    )


def _check_output(chosen: Sequence[Experiment]) -> None:
  """Rejects an address where other programs would write to it."""
  if not addresses.is_address(_OUTPUT.value):
    return
  for experiment in chosen:
    if experiment.programs:
      raise InputError(
        f"{experiment.id} runs other programs, which write to folders of this "
        f"machine; give one as --output instead of {_OUTPUT.value}."
      )


def _check_hosts(chosen: Sequence[Experiment]) -> None:
  """Rejects experiments that several hosts cannot run."""
  if multihost.count() == 1:
    return
  for experiment in chosen:
    if experiment.programs:
      raise InputError(
        f"{experiment.id} runs other programs, which would need the devices of "
        "this one; leave out --multihost, or give it to the programs that "
        "--dry_run names."
      )
    # These read whole arrays, of which a host has a part only.
    analyses = any(isinstance(part, Analysis) for part in experiment.parts)
    if analyses and run_inputs.mesh_spans_hosts():
      raise InputError(
        f"{experiment.id} measures on one host's devices; leave out --mesh, or "
        "give one of as many devices as a host has."
      )


def _check_trials(
  chosen: Sequence[Experiment], given: Mapping[str, str]
) -> None:
  """Rejects --trials where there would be none."""
  for experiment in chosen:
    if not any(_TRIALS.name in each.needs for each in experiment.programs):
      raise InputError(
        f"--trials is for E3.6 and E3.7, not for {experiment.id}."
      )
    called = programs.chosen(experiment.programs, given)
    if not any(_TRIALS.name in each.needs for each in called):
      raise InputError(
        f"--trials repeats {experiment.id} on LongBench; give its --data, with "
        "a --model that can answer it."
      )


def _given() -> dict[str, str]:
  """Returns the flags given on the command line."""
  all_flags = flags.FLAGS
  given = {
    name: all_flags[name].value for name in all_flags if all_flags[name].present
  }
  return {
    name: ",".join(value) if isinstance(value, list) else str(value)
    for name, value in given.items()
    if value is not False
  }


if __name__ == "__main__":
  cli.run_on_arguments(main, sends=True, connect=host_inputs.start)
