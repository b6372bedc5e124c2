"""Times kernels, relative to the device's bandwidth.

  kvjax benchmark_kernels

runs the memory-bound operations of kernels/ at the sizes of their specs.py:
with our kernel on TPUs and Hopper GPUs, with XLA's program, and `select` also
with `lax.top_k` and a sort. They take turns with the reading of a large array.
It prints a table and writes results/kernels/{summary.json,table.md}:

- ms: median over the rounds;
- GB/s: the minimum bytes that must move, per second of that time;
- % of bandwidth: the same, relative to the array that is read;
- × xla: XLA's time relative to the program's;
- difference: the maximum difference from XLA's result, relative to its largest
  number.

An operand that fits into the device's caches may be read from there. The engine
benefits from this too, since it uses rows one after another.

It takes two minutes on two idle cores. --only=attention_mass times a
compute-bound operation, which needs a GPU or a TPU.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from kvjax.experiments import cli
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.report import benchmark_tables
from kvjax.experiments.run import environment, outputs
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.timing import kernel_tables, kernel_timing
from kvjax.kernels.specs import Spec, named_specs

_MEMORY_BOUND = [
  *("gather", "paged_attention", "select", "sketch", "sparse_decode")
]

_ONLY = flags.DEFINE_list(
  "only", _MEMORY_BOUND, "Names of the operations to time."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Number of timings per program.", lower_bound=1
)
for name in ("seed", "kernels_table"):
  flags.declare_key_flag(name)
_OUTPUT = flags.DEFINE_string("output", "results/kernels", "Output folder.")


def main() -> None:
  """Checks all flags, then times the kernels."""
  wanted = kernel_tables.chosen(list(named_specs()), _ONLY.value)
  folder = outputs.folder(_OUTPUT.value)
  cli.announce()
  rows = _measure(wanted)
  summary = {
    "rounds": _ROUNDS.value,
    "seed": run_inputs.SEED.value,
    "read_bytes": kernel_timing.READ,
    "device": environment.device(),
    "versions": environment.versions(),
    "rows": rows,
  }
  outputs.write_json(folder / "summary.json", summary)
  benchmark_tables.show(
    folder, kernel_tables.table(rows), kernel_tables.about(summary)
  )


def _measure(wanted: Sequence[tuple[str, Spec]]) -> list[dict[str, Any]]:
  """Measures the rows of the table, with a progress bar."""
  rows: list[dict[str, Any]] = []
  with run_inputs.chosen_table(), progress_bar(len(wanted)) as advance:
    for name, spec in wanted:
      about = f"{name}, {spec.name}"[:40]
      advance(about, 0)
      measured = kernel_timing.measure(
        spec, kernel_timing.READ, _ROUNDS.value, run_inputs.SEED.value
      )
      rows += kernel_tables.rows(name, spec, *measured)
      advance(about, 1)
  return rows


if __name__ == "__main__":
  cli.run(main)
