"""Runs the benchmarks of a GPU or TPU, one after another.

  kvjax benchmark_device

checks and times every kernel, decodes with random weights of a published
model's sizes, and times retrieval and scoring. Every
step is a program of its own. What it prints goes to STEP.txt in --output, below
its command; steps whose file is there are not run again. The steps:

- check: every kernel beside XLA's program, equal results;
- kernels: their times, and XLA's;
- decode_LENGTH: tokens per second from the full cache, from a quarter and a
  sixteenth, and with CTkvr, and the share of the memory's bandwidth;
- batch: 32 prompts of 8,192 tokens, of which 2,048 are kept;
- sparse: one layer's retrieval beside attention to the full cache, and the
  time to index;
- scoring: one layer's scores by several methods, and its attention.

It has run on CPUs with small numbers only. --only=decode,sparse runs some.
"""

import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.run import outputs, results
from kvjax.experiments.tpu.published import SHIPPED, Published

_SIZES = flags.DEFINE_string(
  "sizes",
  "llama-3.1-8b",
  f"Sizes of the model: a config.json, or one of {', '.join(SHIPPED)}.",
)
_LENGTH = flags.DEFINE_list(
  "length", ["32768", "131072"], "Tokens of prompt and answer."
)
_ROWS = flags.DEFINE_list(
  "rows", ["4", "1"], "Prompts per batch at each of these lengths."
)
_KINDS = ("check", "kernels", "decode", "batch", "sparse", "scoring")
_ONLY = flags.DEFINE_list("only", list(_KINDS), "Steps to run.")
_OUTPUT = flags.DEFINE_string("output", "results/device", "Output folder.")

_FAILED = 1
_METHODS = "--methods=keydiff,adakv,ctkvr.512"
_SCORED = "--methods=keydiff,lagkv:lag=128,compactor,snapkv,protokv"
# A prompt and what is decoded after it have --length tokens together.
_DECODED = 64
_TOKENS = (f"--tokens={_DECODED}",)


def main() -> None:
  """Checks all flags, then runs the steps that have no file yet."""
  lengths = run_inputs.parse_lengths(_LENGTH.value)
  rows = run_inputs.parse_lengths(_ROWS.value)
  if len(rows) != len(lengths):
    raise InputError(
      f"--rows has {len(rows)} numbers and --length {len(lengths)}; every "
      "length has a batch of its own."
    )
  unknown = [kind for kind in _ONLY.value if kind not in _KINDS]
  if unknown or not _ONLY.value:
    raise InputError(
      f"--only takes some of {', '.join(_KINDS)}; "
      f"{','.join(_ONLY.value)!r} does not fit."
    )
  Published.find(_SIZES.value)
  folder = pathlib.Path(_OUTPUT.value)
  results.check_writable(folder)
  console = rich.console.Console(highlight=False)
  failed = []
  for name, arguments in _steps(dict(zip(lengths, rows, strict=True))):
    if name.partition("_")[0] not in _ONLY.value:
      continue
    path = folder / f"{name}.txt"
    if path.exists():
      console.print(f"{path} is there.", soft_wrap=True)
    elif not _run(path, arguments, console):
      failed.append(name)
  if failed:
    console.print(f"These steps failed: {', '.join(failed)}.")
    sys.exit(_FAILED)


def _steps(rows: dict[int, int]) -> Iterator[tuple[str, list[str]]]:
  """Yields names and commands.

  Args:
    rows: prompts per batch by length.
  """
  lengths = f"--length={','.join(map(str, rows))}"
  decode = ["benchmark_decode", f"--sizes={_SIZES.value}"]
  yield "check", ["device_check"]
  yield "kernels", ["benchmark_kernels"]
  for length, batch in rows.items():
    prompt = f"--length={length - _DECODED}"
    yield (
      f"decode_{length}",
      [*decode, _METHODS, prompt, f"--rows={batch}", *_TOKENS],
    )
  yield (
    "batch",
    [
      *(*decode, "--methods=keydiff,lagkv.kvpress,snapkv", "--budget=2048"),
      *("--length=8192", "--rows=32", *_TOKENS),
    ],
  )
  yield "sparse", ["benchmark_sparse", lengths]
  if len(rows) > 1:
    yield "scoring", ["benchmark_scaling", lengths, _SCORED]


def _run(
  path: pathlib.Path, arguments: Sequence[str], console: rich.console.Console
) -> bool:
  """Runs a step and keeps what it prints; returns whether it succeeded."""
  program, *rest = arguments
  command = f"kvjax {shlex.join(arguments)}"
  console.print(command, markup=False, soft_wrap=True)
  # Progress and errors go to this terminal.
  done = subprocess.run(
    [sys.executable, "-m", f"kvjax.experiments.{program}", *rest],
    stdout=subprocess.PIPE,
    text=True,
    check=False,
  )
  console.print(done.stdout, markup=False, soft_wrap=True)
  if done.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
    raise KeyboardInterrupt
  if done.returncode:
    return False
  outputs.write_text(path, f"{command}\n\n{done.stdout}")
  return True


if __name__ == "__main__":
  cli.run(main)
