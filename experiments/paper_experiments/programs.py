"""Programs of their own that make experiments."""

import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from kvjax.experiments.paper_experiments.records import Program


def chosen(
  programs: Sequence[Program], given: Mapping[str, str]
) -> list[Program]:
  """Those that run, given the user's flags by their names."""
  return [
    program
    for program in programs
    if (not program.needs or program.needs in given)
    and program.unless not in given
  ]


def folder_of(program: Program, folder: pathlib.Path) -> pathlib.Path:
  """Where a program writes to, in the folder of its experiment."""
  return folder / program.name


def command(
  program: Program, folder: pathlib.Path, given: Mapping[str, str]
) -> list[str]:
  """Module and flags; what the user has given goes before what is set here."""
  own = [
    f"--{name}={given[flag]}"
    for flag, name in program.takes.items()
    if flag in given
  ]
  return [
    f"kvjax.experiments.{program.module}",
    f"--output={folder_of(program, folder)}",
    *(argument.format(folder=folder) for argument in program.arguments),
    *own,
  ]


def call(
  program: Program, folder: pathlib.Path, given: Mapping[str, str]
) -> None:
  """Starts it, on the same terminal.

  Raises:
    SystemExit: it has failed, and said why.
  """
  run = [sys.executable, "-m", *command(program, folder, given)]
  code = subprocess.run(run).returncode
  if code:
    raise SystemExit(code)
