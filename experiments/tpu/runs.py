"""What a run compiles, and how it ends."""

import pathlib
import sys
from collections.abc import Mapping, Sequence

import rich.console

from kvjax.errors import InputError
from kvjax.experiments import reports
from kvjax.experiments.tpu import tables
from kvjax.experiments.tpu.programs import KINDS, Outcome, Program

COMMAND = "make tpu-compile"


def finish(
  outcomes: Sequence[Outcome],
  output: pathlib.Path | None,
  versions: Mapping[str, str],
) -> None:
  """Prints what was found; then writes it, or exits with code 1."""
  rich.console.Console(highlight=False).print(tables.to_terminal(outcomes))
  faults = tables.faults(outcomes)
  if faults:
    print(faults, end="", file=sys.stderr)
    sys.exit(1)
  if output is not None:
    text = tables.to_markdown(outcomes, COMMAND, versions)
    output.parent.mkdir(parents=True, exist_ok=True)
    reports.write_text(output, text)


def chosen(
  found: Sequence[Program], only: Sequence[str] | None
) -> list[Program]:
  """Those of the kinds or names that are asked for.

  Raises:
    InputError: nothing is of that kind or name.
  """
  if only is None:
    return list(found)
  for name in only:
    if all(name not in (p.kind, p.name) for p in found):
      known = dict.fromkeys([*KINDS, *(p.name for p in found)])
      raise InputError(f"--only has {name!r}; there are {', '.join(known)}.")
  return [p for p in found if p.kind in only or p.name in only]


def quick(found: Sequence[Program]) -> list[Program]:
  """The first use of each kernel and decoding by each method: no prefill."""
  firsts: dict[tuple[str, str, str], Program] = {}
  for program in found:
    if program.kind != "prefill":
      own = (program.kind, program.name, program.function)
      firsts.setdefault(own, program)
  return list(firsts.values())
