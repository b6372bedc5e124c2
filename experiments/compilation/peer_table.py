"""The table of docs/performance.md: our kernels for decoding beside JAX's.

    make peer-kernels

compiles our attention to cached tokens and JAX's kernels for it, for a v5e and
an H100 that need not be there, and writes the table into the page, from the
root of the repository.
"""

import pathlib
import textwrap
from collections.abc import Iterator

import jax

from kvjax import files
from kvjax.experiments import cli
from kvjax.experiments.compilation import chips
from kvjax.experiments.compilation.kernel_programs import kernel_programs
from kvjax.experiments.compilation.peer_kernels import (
  OURS_IN_STACKS,
  peer_programs,
  stack_programs,
)
from kvjax.experiments.compilation.programs import Outcome, Program, compiled
from kvjax.experiments.report import formats, page_parts
from kvjax.experiments.report.wording import NOTHING, mib
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.kernels.programs import Platform

PAGE = pathlib.Path("docs", "performance.md")
PART = "peer_kernels"
_OPERATION = "paged_attention"
_OURS = (_OPERATION, OURS_IN_STACKS)
_CHIPS: dict[Platform, str] = {"tpu": "v5e", "gpu": "h100"}
# Characters of a compiler's message.
_MOST = 90
_HEADER = ("chip", "pages", "kernel", "arguments", "temporary", "VMEM", "moved")


def programs_of(platform: Platform) -> list[Program]:
  """Lists our kernels and their peers, those of a size together."""
  ours = [x for x in kernel_programs(platform) if x.name == _OPERATION]
  peers = list(peer_programs(platform))
  paged = [
    each
    for own in ours
    for each in (own, *(peer for peer in peers if peer.shapes == own.shapes))
  ]
  return paged + (list(stack_programs()) if platform == "gpu" else [])


def line(outcome: Outcome) -> tuple[str, ...]:
  """Formats what a kernel takes, or why it does not compile."""
  program, chip, footprint = outcome.program, outcome.chip, outcome.footprint
  kernel = "kvjax" if program.name in _OURS else program.name
  named = (chip.name, program.shapes, kernel)
  if footprint is None:
    fault = textwrap.shorten(outcome.fault or "", _MOST, placeholder=" ...")
    return (*named, f"`{fault}`", *[NOTHING] * 3)
  # What is counted as moved is not true of programs for GPUs.
  tpu = chip.platform == "tpu"
  return (
    *named,
    mib(footprint.arguments),
    mib(footprint.temporary),
    mib(footprint.vmem) if tpu else NOTHING,
    mib(footprint.moved) if tpu else NOTHING,
  )


def outcomes(platform: Platform) -> Iterator[Outcome]:
  """Compiles all programs for the chip of a platform."""
  chips.prepare(platform)
  chip = chips.Chip.load(_CHIPS[platform])
  for program in programs_of(platform):
    yield compiled(program, chip)
    jax.clear_caches()  # traced programs are large and not needed again


def main() -> None:
  """Compiles all kernels, and writes the table."""
  page = files.read_text(PAGE)
  lines = []
  with progress_bar(None) as advance:
    for platform in _CHIPS:
      for outcome in outcomes(platform):
        lines.append(line(outcome))
        advance(f"{outcome.chip.name}, {outcome.program.name}", 1)
  table = formats.grid(_HEADER, lines, (0, 1, 2))
  files.write_text(PAGE, page_parts.replace(page, PART, table))


if __name__ == "__main__":
  cli.run(main)
