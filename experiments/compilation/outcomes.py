"""Selects the programs of a run and reports its result."""

import pathlib
import sys
from collections.abc import Mapping, Sequence

import rich.console

from kvjax.experiments import refusals
from kvjax.experiments.compilation import tables
from kvjax.experiments.compilation.programs import KINDS, Outcome, Program
from kvjax.experiments.run import outputs
from kvjax.kernels.programs import Platform

COMMAND = "make tpu-compile"


def finish(
  outcomes: Sequence[Outcome],
  output: pathlib.Path | None,
  versions: Mapping[str, str],
) -> None:
  """Prints the outcomes, then writes the page or exits with code 1."""
  rich.console.Console(highlight=False).print(tables.to_terminal(outcomes))
  faults = tables.faults(outcomes)
  if faults:
    print(faults, end="", file=sys.stderr)
    sys.exit(1)
  if output is not None:
    text = tables.to_markdown(outcomes, COMMAND, versions)
    outputs.write_text(output, text)


def chosen(
  programs: Sequence[Program], only: Sequence[str] | None
) -> list[Program]:
  """Selects programs by kinds or names.

  Raises:
    InputError: no program has the kind or name.
  """
  if only is None:
    return list(programs)
  known = dict.fromkeys([*KINDS, *(p.name for p in programs)])
  refusals.refuse_unknown("only", only, known)
  return [p for p in programs if p.kind in only or p.name in only]


def quick(programs: Sequence[Program], platform: Platform) -> list[Program]:
  """Selects the first use of each kernel and of decoding.

  The first prefill is only among them for GPUs, where it takes half a minute.
  """
  firsts: dict[tuple[str, ...], Program] = {}
  for program in programs:
    key: tuple[str, ...] = (program.kind, program.name, program.function)
    if program.kind == "prefill":
      if platform == "tpu":
        continue
      key = (program.kind,)
    firsts.setdefault(key, program)
  return list(firsts.values())
