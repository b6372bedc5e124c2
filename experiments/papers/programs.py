"""Other programs as parts of experiments: which ones, and their commands."""

import os
import pathlib
from collections.abc import Mapping, Sequence

from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.papers.data_model import Program
from kvjax.files import read_json_if_present


def chosen(
  programs: Sequence[Program], given: Mapping[str, str]
) -> list[Program]:
  """Selects the programs to run for the user's flags."""
  return [
    program
    for program in programs
    if all(flag in given for flag in program.needs)
    and not any(flag in given for flag in program.unless)
  ]


def tau_of(model: str) -> float:
  """Returns the quality that Compactor preserves for a model.

  It is 0.90 for Qwen and 0.95 for Llama, here for all others.

  Args:
    model: as --model names it. Its config.json says what it is; without one,
      its name does, but not the folders that it is in.
  """
  path = pathlib.Path(os.path.realpath(model))
  config = read_json_if_present(path / "config.json") if path.is_dir() else {}
  kind = str(config.get("model_type") or run_inputs.name_of(path))
  return 0.9 if "qwen" in kind.lower() else 0.95


def command(
  program: Program, folder: pathlib.Path, given: Mapping[str, str]
) -> list[str]:
  """Builds module and flags; the user's flags replace those set here.

  Without a model of the user's, the programs ask the reference model.
  """
  model = given.get("model")
  scaled = program.small if model is None else program.paper
  names = {"folder": folder, "tau": tau_of(model or "")}
  values = {"model": run_inputs.REFERENCE, **given}
  model_and_user_flags = {
    f"--{name}": values[flag]
    for flag, name in program.takes.items()
    if flag in values
  }
  fixed = [
    argument.format(**names)
    for argument in (*program.arguments, *scaled)
    if argument.partition("=")[0] not in model_and_user_flags
  ]
  return [
    f"kvjax.experiments.{program.module}",
    f"--output={folder / program.name}",
    *fixed,
    *(f"{name}={value}" for name, value in model_and_user_flags.items()),
  ]


def has_dry_run(program: Program) -> bool:
  """Whether it can say what it costs before the experiment's others ran."""
  arguments = (*program.arguments, *program.paper, *program.small)
  reads_theirs = any("{folder}" in argument for argument in arguments)
  return program.module == "calibrate" and not reads_theirs
