"""Runs the benchmarks of a GPU or TPU, one after another.

  kvjax benchmark_device

checks and times every kernel, decodes with random weights of a published
model's sizes, and times retrieval and scoring. How many minutes that takes has
not been measured. Every step is a program of its own. What it prints goes to
STEP.txt in --output, below its command; steps whose file is there, of the same
command, are not run again. The steps:

- check: every kernel beside XLA's program, equal results;
- kernels: their times, and XLA's;
- decode_LENGTH: tokens per second from the full cache, from a quarter and a
  sixteenth, and with CTkvr, and the share of the memory's bandwidth;
- batch: 32 prompts of 8,192 tokens, of which 2,048 are kept;
- sparse: one layer's retrieval beside attention to the full cache, and the
  time to index;
- scoring: one layer's scores by several methods, and its attention.

Its steps but `kernels` have run on a GPU one by one, with fewer methods; the
suite has run on CPUs, with small numbers. --only=decode,sparse runs some.
"""

import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

from absl import flags

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.compilation.published import SHIPPED, Published
from kvjax.experiments.run import children, outputs
from kvjax.experiments.run.sentences import say
from kvjax.experiments.timing import device_steps

_SIZES = flags.DEFINE_string(
  "sizes",
  "llama-3.1-8b",
  f"Sizes of the model: a config.json, or one of {', '.join(SHIPPED)}.",
)
_SHAPES = flags.DEFINE_list(
  "shapes",
  ["4x32768", "1x131072"],
  "Batches to decode: prompts, and the tokens that prompt and answer have.",
)
_ONLY = flags.DEFINE_list("only", list(device_steps.KINDS), "Steps to run.")
_OUTPUT = flags.DEFINE_string("output", "results/device", "Output folder.")

_FAILED = 1
_SHAPE = re.compile("([1-9][0-9]{0,5})x([1-9][0-9]{2,8})")


def main() -> None:
  """Checks all flags, then runs the steps that have no file yet."""
  shapes = [_SHAPE.fullmatch(text.strip()) for text in _SHAPES.value]
  rows = {int(found[2]): int(found[1]) for found in shapes if found}
  if not rows or len(rows) < len(shapes):
    raise InputError(
      "--shapes takes batches of different lengths from 100 tokens on, such as "
      f"4x32768,1x131072; {','.join(_SHAPES.value)[:60]!r} does not fit."
    )
  unknown = [kind for kind in _ONLY.value if kind not in device_steps.KINDS]
  if unknown or not _ONLY.value:
    raise InputError(
      f"--only takes some of {', '.join(device_steps.KINDS)}; "
      f"{','.join(_ONLY.value)!r} does not fit."
    )
  Published.find(_SIZES.value)
  folder = outputs.folder(_OUTPUT.value)
  chosen = {
    folder / f"{name}.txt": arguments
    for name, arguments in device_steps.steps(rows, _SIZES.value, folder)
    if name.partition("_")[0] in _ONLY.value
  }
  for path, arguments in chosen.items():
    _check_command(path, arguments)
  cli.announce()
  failed = []
  for path, arguments in chosen.items():
    if path.exists():
      say(f"{path} is there.")
    elif not _run(path, arguments):
      failed.append(path.stem)
  if failed:
    say(f"These steps failed: {', '.join(failed)}.")
    sys.exit(_FAILED)


def _command(arguments: Sequence[str]) -> str:
  """The command of a step, which is the first line of its file."""
  return f"kvjax {shlex.join(arguments)}"


def _check_command(path: pathlib.Path, arguments: Sequence[str]) -> None:
  """Refuses the file of another command."""
  if not path.exists():
    return
  before, _, _ = files.read_text(path).partition("\n")
  if before != _command(arguments):
    raise InputError(
      f"{path} is of another command, {before[:200]!r}; remove it, or choose "
      "another --output."
    )


def _run(path: pathlib.Path, arguments: Sequence[str]) -> bool:
  """Runs a step and keeps what it prints; returns whether it succeeded."""
  program, *rest = arguments
  command = _command(arguments)
  say(command)
  # Progress and errors go to this terminal.
  module = f"kvjax.experiments.{program}"
  code, printed = children.run(module, rest, keep=True)
  say(printed)
  if code:
    return False
  outputs.write_text(path, f"{command}\n\n{printed}")
  return True


if __name__ == "__main__":
  cli.run(main)
