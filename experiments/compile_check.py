"""Compiles kernels and engine for TPUs or GPUs: do they fit?

  make tpu-compile
  make gpu-compile

fetch libtpu into .libtpu, or JAX's plugin for GPUs into .cuda, and run

  kvjax compile_check

which compiles for chips that need not be attached: every kernel at the sizes of
its specs.py, for Llama-3.1-8B the prefill of a long prompt and the decoding
loop over the compressed cache, and that loop for Gemma 3 27B and gpt-oss-20b,
where most layers are rings. The program prints the memory of every compiled
program per chip, for TPUs also VMEM and memory traffic, and writes
docs/tpu_compile.md if all succeed for TPUs. It takes half an hour on an idle
core, and 6 GB; for an H100, three minutes.

It exits with code 1, and a line for each failure, if a program does not
compile, a kernel declines, a program does not fit on a chip, or data that
belong in host memory are not there.

    make tpu-compile ARGS=--quick
    make gpu-compile ARGS=--quick

compile each kernel function once, and decoding in a model of two layers: for
v5e, or with a prefill for an H100.
"""

import pathlib
from collections.abc import Sequence
from importlib import metadata
from typing import cast

import jax
from absl import flags

from kvjax.experiments import cli, refusals
from kvjax.experiments.compilation import chips, programs
from kvjax.experiments.compilation.engine_programs import engine_programs
from kvjax.experiments.compilation.kernel_programs import kernel_programs
from kvjax.experiments.compilation.outcomes import chosen, finish, quick
from kvjax.experiments.compilation.programs import Outcome, Program
from kvjax.experiments.compilation.published import LLAMA
from kvjax.experiments.run import outputs
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.kernels.programs import Platform

# From the root of the checkout, where make runs.
_PAGE = "docs/tpu_compile.md"
_PACKAGES = ("kvjax", "jax", "jaxlib", "libtpu")
_QUICK_LAYERS = 2

_PLATFORM = flags.DEFINE_enum(
  "platform", "tpu", list(chips.NAMES), "What to compile for."
)
_CHIPS = flags.DEFINE_list(
  "chips", None, "Chips to compile for; the default is all of the platform."
)
_ONLY = flags.DEFINE_list(
  "only",
  None,
  f"What to compile: {', '.join(programs.KINDS)}, or operations and methods "
  "by name; the default is everything.",
)
_LAYERS = flags.DEFINE_integer(
  "layers",
  None,
  f"Layers of {LLAMA.name}, then the only model; the default is whole models.",
  lower_bound=1,
)
_QUICK = flags.DEFINE_bool(
  "quick", False, "One use of each function, in shallow models, on one chip."
)
_OUTPUT = flags.DEFINE_string(
  "output",
  None,
  "Output file; the default is docs/tpu_compile.md if everything is compiled "
  "for TPUs, otherwise none.",
)


def main() -> None:
  """Checks all flags, then compiles."""
  for other in ("chips", "only", "layers"):
    refusals.refuse_together("quick", [other], "it chooses for itself")
  platform = cast(Platform, _PLATFORM.value)
  wanted = _wanted(platform)
  names = _chip_names(chips.NAMES[platform])
  output = _output(platform)
  chips.prepare(platform)
  if not _QUICK.value:
    cli.announce()
  packages = _PACKAGES if output is not None else ()
  versions = {name: metadata.version(name) for name in packages}
  finish(_compiled(wanted, names), output, versions)


def _wanted(platform: Platform) -> list[Program]:
  layers = _QUICK_LAYERS if _QUICK.value else _LAYERS.value
  candidates = [*kernel_programs(platform), *engine_programs(layers, platform)]
  if _QUICK.value:
    return quick(candidates, platform)
  return chosen(candidates, _ONLY.value)


def _chip_names(known: Sequence[str]) -> list[str]:
  """Parses --chips; errors are those of `refusals.refuse_unknown`."""
  if _QUICK.value:
    return [known[0]]
  if _CHIPS.value is None:
    return list(known)
  refusals.refuse_unknown("chips", _CHIPS.value, known)
  return list(dict.fromkeys(_CHIPS.value))


def _output(platform: Platform) -> pathlib.Path | None:
  """Returns the file to write, if any; errors are those of `outputs.file`."""
  if platform != "tpu":
    refusals.refuse_together("output", ["platform"], "the page is about TPUs")
    return None
  if _OUTPUT.value is not None:
    return outputs.file(_OUTPUT.value)
  parts = ("chips", "only", "layers", "quick")
  complete = not any(flags.FLAGS[name].present for name in parts)
  return outputs.file(_PAGE) if complete else None


def _compiled(wanted: Sequence[Program], names: Sequence[str]) -> list[Outcome]:
  """Compiles everything for every chip, under a progress bar."""
  outcomes = []
  with progress_bar(len(wanted) * len(names)) as advance:
    for name in names:
      chip = chips.Chip.load(name)
      for program in wanted:
        about = f"{name}, {program.kind} {program.name}"
        advance(about, 0)
        outcomes.append(programs.compiled(program, chip))
        jax.clear_caches()  # traced programs are large and not needed again
        advance(about, 1)
  return outcomes


if __name__ == "__main__":
  cli.run(main)
