"""Compilation results as tables for terminals and Markdown."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence

import rich.console
import rich.text

from kvjax.experiments.compilation.chips import Chip
from kvjax.experiments.compilation.programs import Outcome
from kvjax.experiments.compilation.published import LLAMA
from kvjax.experiments.report import formats, wording
from kvjax.experiments.report.wording import NOTHING, mib

_HEAD = (
  *("program", "VMEM", "temporary", "arguments", "host", "overlap", "HBM %"),
  *("moved", "ideal", "× ideal", "at best µs"),
)
# The columns that fit on a terminal.
_SHORT = {
  "program": "program",
  "VMEM": "VMEM",
  "temporary": "temp.",
  "arguments": "args.",
  "host": "host",
  "HBM %": "HBM %",
  "× ideal": "× ideal",
}
_MEANING = f"""\
MiB per device. The model is {LLAMA.name}, if no other is named, in bfloat16
with one prompt, all devices along the mesh axis "model"; a kernel runs on one
device."""

_LEGEND = pathlib.Path(__file__).with_name("legend.md").read_text("utf-8")


def to_markdown(
  outcomes: Sequence[Outcome], command: str, versions: Mapping[str, str]
) -> str:
  """Formats the tables of all chips, with a legend and the command."""
  parts = [
    "# Compiling for TPUs\n",
    f"    {command}\n",
    "compiles without a TPU, by libtpu, and writes this page: "
    + wording.versions(versions)
    + ".\n",
    f"{_MEANING}\n\n{_LEGEND}",
  ]
  for chip, group in _by_chip(outcomes):
    table = formats.grid(_HEAD, map(_cells, group))
    parts.append(f"## {chip.name}\n\n{_facts(chip)}\n\n{table}")
  parts.append(_contents(outcomes))
  return "\n".join(parts)


def to_terminal(outcomes: Sequence[Outcome]) -> rich.console.Group:
  """Formats the main columns for a terminal of 80 columns."""
  shown: list[rich.console.RenderableType] = []
  for chip, group in _by_chip(outcomes):
    cells = [dict(zip(_HEAD, _cells(each), strict=True)) for each in group]
    # Nothing is in some columns of GPUs.
    names = [x for x in _SHORT if any(line[x] != NOTHING for line in cells)]
    lines = [[line[x] for x in names] for line in cells]
    table = formats.Table("", [_SHORT[x] for x in names], lines)
    shown += [rich.text.Text(f"{chip.name}: {_facts(chip)}"), table]
  shown.append(rich.text.Text(_MEANING, style="dim"))
  return rich.console.Group(*shown)


def faults(outcomes: Sequence[Outcome]) -> str:
  """Lists the programs that failed, one per line."""
  return "".join(
    f"{outcome.chip.name}, {title(outcome)}: {outcome.fault}\n"
    for outcome in outcomes
    if outcome.fault is not None
  )


def title(outcome: Outcome) -> str:
  """Names the compiled program."""
  program = outcome.program
  kind = "" if program.kind == "kernel" else f"{program.kind}, "
  return f"{kind}{program.name}, {program.shapes}"


def _by_chip(outcomes: Sequence[Outcome]) -> list[tuple[Chip, list[Outcome]]]:
  groups = itertools.groupby(outcomes, key=lambda outcome: outcome.chip)
  return [(chip, list(group)) for chip, group in groups]


def _facts(chip: Chip) -> str:
  hbm = (
    f"{mib(chip.hbm_bytes)} MiB of HBM at "
    f"{chip.bytes_per_second / 1e9:,.0f} GB/s"
  )
  if chip.platform == "gpu":
    return f"a GPU with {hbm}."
  return (
    f"{len(chip.devices)} devices ({chip.topology}), each with {hbm} and "
    f"{mib(chip.vmem_bytes)} MiB of VMEM per core."
  )


def _cells(outcome: Outcome) -> tuple[str, ...]:
  footprint, ideal = outcome.footprint, outcome.ideal
  if footprint is None:
    return (title(outcome), *[NOTHING] * (len(_HEAD) - 1))
  vmem = outcome.chip.vmem_bytes
  cells = (
    title(outcome),
    mib(footprint.vmem) if footprint.kernels and vmem else NOTHING,
    mib(footprint.temporary),
    mib(footprint.arguments),
    mib(footprint.host) if footprint.host else NOTHING,
    str(footprint.overlap) if footprint.host else NOTHING,
    f"{100 * footprint.hbm / outcome.chip.hbm_bytes:.1f}",
  )
  if ideal is None:
    return (*cells, *[NOTHING] * 4)
  return (
    *cells,
    mib(footprint.moved),
    mib(ideal),
    f"{footprint.moved / ideal:.2f}",
    f"{1e6 * ideal / outcome.chip.bytes_per_second:,.0f}",
  )


def _contents(outcomes: Sequence[Outcome]) -> str:
  """Formats the operands of kernels, and the kernels of programs."""
  listed: dict[str, str] = {}
  for outcome in outcomes:
    program, footprint = outcome.program, outcome.footprint
    if program.operands is not None:
      listed[title(outcome)] = program.operands()
    elif footprint is not None and footprint.kernels:
      listed[title(outcome)] = ", ".join(footprint.kernels)
  header = ("program", "operands, or the kernels in it")
  lines = [(name, f"`{text}`") for name, text in listed.items()]
  return f"## Operands and kernels\n\n{formats.grid(header, lines, [0, 1])}"
