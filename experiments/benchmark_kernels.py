"""Times the kernels on the device at hand, beside its copies.

  python -m kvjax.experiments.benchmark_kernels

runs the operations of kernels/ that memory limits, at the sizes of real models
that their specs.py name: by our kernel, on TPUs and Hopper GPUs, by XLA's
program, and `select` by `lax.top_k` with a sort too. They take turns with
copies of a large array. Prints a table and writes
results/kernels/{summary.json,table.md}:

- ms: median of some rounds;
- GB/s: the fewest bytes that must move, over that time;
- % of copies: the same over what the copies beside it reached;
- × xla: XLA's time over the program's;
- difference: the largest one from what XLA's program computes, over its largest
  number.

An operand that fits into the device's caches may be read from there: of rows
that are used one after another, that is what the engine meets too.

Takes two minutes on two idle cores. --only=attention_mass times what
operations limit rather than bytes, which takes a GPU or a TPU.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.progress
from absl import flags

from kvjax.experiments import (
  cli,
  inputs,
  kernel_tables,
  kernel_timing,
  reports,
  results,
)
from kvjax.kernels.specs import Spec, named_specs

_LIMITED_BY_MEMORY = [
  "gather",
  "paged_attention",
  "select",
  "sketch",
  "sparse_decode",
]

_ONLY = flags.DEFINE_list(
  "only", _LIMITED_BY_MEMORY, "Operations to time, by name."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "How often each program is timed.", lower_bound=1
)
flags.declare_key_flag("seed")
_OUTPUT = flags.DEFINE_string(
  "output", "results/kernels", "Folder to write to."
)


def main() -> None:
  """Checks what can be checked first, then times."""
  wanted = kernel_tables.chosen(list(named_specs()), _ONLY.value)
  folder = pathlib.Path(_OUTPUT.value)
  results.check_writable(folder)
  summary = {
    "rounds": _ROUNDS.value,
    "seed": inputs.SEED.value,
    "copied_bytes": kernel_timing.COPIED,
    "device": reports.device(),
    "versions": reports.versions(),
    "rows": _measure(wanted),
  }
  text = kernel_tables.to_markdown(summary)
  folder.mkdir(parents=True, exist_ok=True)
  reports.write_json(folder / "summary.json", summary)
  reports.write_text(folder / "table.md", text)
  console = rich.console.Console(highlight=False)
  console.print(text, markup=False, soft_wrap=True)


def _measure(wanted: Sequence[tuple[str, Spec]]) -> list[dict[str, Any]]:
  """The rows of the table, under a progress bar."""
  found: list[dict[str, Any]] = []
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description:60}"),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    console=rich.console.Console(stderr=True),
  ) as progress:
    bar = progress.add_task("", total=len(wanted))
    for name, spec in wanted:
      progress.update(bar, description=f"{name}, {spec.name}"[:60])
      measured = kernel_timing.measure(
        spec, kernel_timing.COPIED, _ROUNDS.value, inputs.SEED.value
      )
      found += kernel_tables.rows(name, spec, *measured)
      progress.advance(bar)
  return found


if __name__ == "__main__":
  cli.run(main)
