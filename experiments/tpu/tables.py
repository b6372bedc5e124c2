"""What compiling came to, as tables for terminals and Markdown."""

import itertools
from collections.abc import Mapping, Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from kvjax.experiments.tpu import llama
from kvjax.experiments.tpu.chips import Chip
from kvjax.experiments.tpu.programs import Outcome

_HEAD = (
  "program",
  "VMEM",
  "temporary",
  "arguments",
  "host",
  "meanwhile",
  "HBM %",
  "moved",
  "ideal",
  "× ideal",
  "at best µs",
)
# What a terminal has room for.
_SHORT = {
  "program": "program",
  "VMEM": "VMEM",
  "temporary": "temp.",
  "arguments": "args.",
  "host": "host",
  "HBM %": "HBM %",
  "× ideal": "× ideal",
}
_NONE = "–"

_MEANING = f"""\
MiB per device. The model is {llama.NAME} in bfloat16 with one prompt, all
devices along the mesh axis "model"; a kernel runs on one device."""

_LEGEND = f"""\
{_MEANING}

- VMEM: what the kernel that takes most of it has to itself.
- temporary: intermediate results and the program itself, in HBM. Keys and
  values in heads of 64 are laid out anew first where they come from outside. On
  tpu7x the MLP weights and the output projection are held once more: its matrix
  products want bfloat16 in tiles of (16, 128), arguments arrive in XLA's own of
  (8, 128), and XLA lays them out anew once before the loop, whatever layout is
  asked for. A prefill of whole prompts calls a program for each layer, and some
  more for each plan, which are compiled once each: of it this is what they
  leave for one another at most, two layers at a time, and the intermediate
  results of the program that has most.
- arguments: weights, tokens and caches in HBM; host: what of them, and of
  results, is in the host's memory.
- meanwhile: fusions and kernels, of all layers, that the device runs while the
  host gathers what a token looks up; XLA's scheduler for the chip decides.
- HBM %: arguments, temporary and new results, of the device's HBM.
- moved: bytes that instructions and kernels read from HBM and write to it; of
  decoding, for a token, without what happens once before the first. Loops count
  as often as they run, those that data end once. Blocks that a kernel chooses
  by data, and what it copies by itself, count as its cost estimate says;
  without one as if all were different, and whole.
- ideal: what must move. For a kernel its `specs.py` counts it; a token reads
  every weight and every slot once, but of the embedding one row. Attention of
  whole prompts, and its mass, read keys once for every tile of queries:
  operations limit them. `sparse_decode` copies words, which are two rows of
  bfloat16 or four of int8.
- at best µs: the ideal at the full bandwidth of HBM.
"""


def to_markdown(
  outcomes: Sequence[Outcome], command: str, versions: Mapping[str, str]
) -> str:
  """The tables of all chips, with what they mean and how they were made."""
  parts = [
    "# What compiling for TPUs says\n",
    f"    {command}\n",
    "compiles without a TPU, by libtpu, and writes this page: "
    + ", ".join(f"{name} {version}" for name, version in versions.items())
    + ".\n",
    _LEGEND,
  ]
  for chip, group in _by_chip(outcomes):
    lines = [_HEAD, (":--", *["--:"] * (len(_HEAD) - 1)), *map(_cells, group)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts.append(f"## {chip.name}\n\n{_facts(chip)}\n\n{table}\n")
  parts.append(_contents(outcomes))
  return "\n".join(parts)


def to_terminal(outcomes: Sequence[Outcome]) -> rich.console.Group:
  """The most of it for a terminal of 80 columns."""
  shown: list[rich.console.RenderableType] = []
  for chip, group in _by_chip(outcomes):
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    first, *numbers = _SHORT.values()
    table.add_column(first, overflow="fold")
    for name in numbers:
      table.add_column(name, justify="right", no_wrap=True)
    for outcome in group:
      cells = zip(_HEAD, _cells(outcome), strict=True)
      table.add_row(*(cell for name, cell in cells if name in _SHORT))
    shown += [rich.text.Text(f"{chip.name}: {_facts(chip)}"), table]
  shown.append(rich.text.Text(_MEANING, style="dim"))
  return rich.console.Group(*shown)


def faults(outcomes: Sequence[Outcome]) -> str:
  """A line for each program that does not serve."""
  return "".join(
    f"{outcome.chip.name}, {title(outcome)}: {outcome.fault}\n"
    for outcome in outcomes
    if outcome.fault is not None
  )


def title(outcome: Outcome) -> str:
  """What was compiled, in words."""
  program = outcome.program
  kind = "" if program.kind == "kernel" else f"{program.kind}, "
  return f"{kind}{program.name}, {program.shapes}"


def _by_chip(
  outcomes: Sequence[Outcome],
) -> list[tuple[Chip, list[Outcome]]]:
  groups = itertools.groupby(outcomes, key=lambda outcome: outcome.chip)
  return [(chip, list(group)) for chip, group in groups]


def _facts(chip: Chip) -> str:
  return (
    f"{len(chip.devices)} devices ({chip.topology}), each with "
    f"{_mib(chip.hbm_bytes)} MiB of HBM at "
    f"{chip.bytes_per_second / 1e9:,.0f} GB/s and "
    f"{_mib(chip.vmem_bytes)} MiB of VMEM per core."
  )


def _cells(outcome: Outcome) -> tuple[str, ...]:
  footprint, ideal = outcome.footprint, outcome.ideal
  if footprint is None:
    return (title(outcome), *[_NONE] * (len(_HEAD) - 1))
  cells = (
    title(outcome),
    _mib(footprint.vmem) if footprint.kernels else _NONE,
    _mib(footprint.temporary),
    _mib(footprint.arguments),
    _mib(footprint.host) if footprint.host else _NONE,
    str(footprint.meanwhile) if footprint.host else _NONE,
    f"{100 * footprint.hbm / outcome.chip.hbm_bytes:.1f}",
  )
  if ideal is None:
    return (*cells, *[_NONE] * 4)
  return (
    *cells,
    _mib(footprint.moved),
    _mib(ideal),
    f"{footprint.moved / ideal:.2f}",
    f"{1e6 * ideal / outcome.chip.bytes_per_second:,.0f}",
  )


def _contents(outcomes: Sequence[Outcome]) -> str:
  """Shapes and dtypes of kernels' operands, and kernels of programs."""
  listed: dict[str, str] = {}
  for outcome in outcomes:
    program, footprint = outcome.program, outcome.footprint
    if program.operands is not None:
      listed[title(outcome)] = program.operands()
    elif footprint is not None and footprint.kernels:
      listed[title(outcome)] = ", ".join(footprint.kernels)
  lines = [
    ("program", "operands, or the kernels in it"),
    (":--", ":--"),
    *((name, f"`{text}`") for name, text in listed.items()),
  ]
  table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
  return f"## What they are made of\n\n{table}\n"


def _mib(size: int) -> str:
  mib = size / 2**20
  return f"{mib:,.0f}" if mib >= 100 else f"{mib:.1f}"
