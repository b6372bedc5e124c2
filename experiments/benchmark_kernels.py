"""Times the kernels on the device at hand, beside its copies.

  python -m experiments.benchmark_kernels

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

Takes five minutes on two idle cores. --only=attention_mass times what
operations limit rather than bytes, which takes a GPU or a TPU.
"""

import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.progress
from absl import flags

from experiments import cli, inputs, kernel_timing, reports, results
from experiments.kernel_timing import XLA, Copies, Timed
from experiments.reporting import wording
from kernels.specs import Spec, named_specs
from kvjax.errors import InputError

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

_HEAD = (
  "operation",
  "program",
  "ms",
  "GB/s",
  "% of copies",
  f"× {XLA}",
  "difference",
)


def main() -> None:
  """Checks what can be checked first, then times."""
  wanted = chosen(list(named_specs()), _ONLY.value)
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
  text = to_markdown(summary)
  folder.mkdir(parents=True, exist_ok=True)
  reports.write_json(folder / "summary.json", summary)
  reports.write_text(folder / "table.md", text)
  console = rich.console.Console(highlight=False)
  console.print(text, markup=False, soft_wrap=True)


def chosen(
  found: Sequence[tuple[str, Spec]], only: Sequence[str]
) -> list[tuple[str, Spec]]:
  """The specifications of the operations that are asked for.

  Raises:
    InputError: there is no such operation, or none is asked for.
  """
  known = list(dict.fromkeys(name for name, _ in found))
  for name in only:
    if name not in known:
      raise InputError(f"--only has {name!r}; there are {', '.join(known)}.")
  if not only:
    raise InputError(f"--only is empty; there are {', '.join(known)}.")
  return [(name, spec) for name, spec in found if name in only]


def rows(
  operation: str, spec: Spec, copies: Copies, timed: Sequence[Timed]
) -> Iterator[dict[str, Any]]:
  """What summary.json says of a specification, a row for each program."""
  by_xla = next(one.bytes_per_second for one in timed if one.program == XLA)
  for one in timed:
    row: dict[str, Any] = {
      "operation": operation,
      "shapes": spec.name,
      "program": one.program,
      "seconds": one.seconds,
      "ideal_bytes": one.ideal_bytes,
      "copies_per_second": copies.bytes_per_second,
    }
    speed = one.bytes_per_second
    if speed is not None and by_xla is not None:
      row |= {
        "bytes_per_second": speed,
        "share_of_copies": speed / copies.bytes_per_second,
        "xla_over_this": speed / by_xla,
        "difference": one.difference,
      }
    yield row


def to_markdown(summary: Mapping[str, Any]) -> str:
  """The table and its circumstances."""
  lines = [_HEAD, (":--", ":--", *["--:"] * (len(_HEAD) - 2))]
  lines += [_cells(row) for row in summary["rows"]]
  return (
    "\n".join(f"| {' | '.join(line)} |" for line in lines)
    + f"\n\n{_circumstances(summary)}\n"
  )


def _circumstances(summary: Mapping[str, Any]) -> str:
  speeds = [row["copies_per_second"] / 1e9 for row in summary["rows"]]
  return "; ".join(
    [
      f"Median of {wording.count(summary['rounds'], 'round')}, seed "
      f"{summary['seed']}, on {summary['device']}",
      f"copies of {summary['copied_bytes'] >> 20} MiB beside them moved "
      f"{min(speeds):,.1f} to {max(speeds):,.1f} GB/s",
      ", ".join(" ".join(pair) for pair in summary["versions"].items()) + ".",
    ]
  )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
  head = f"{row['operation']}, {row['shapes']}", row["program"]
  if row["seconds"] is None:
    return *head, "declines", *["–"] * (len(_HEAD) - 3)
  return (
    *head,
    f"{1e3 * statistics.median(row['seconds']):,.3f}",
    f"{row['bytes_per_second'] / 1e9:,.2f}",
    f"{100 * row['share_of_copies']:.1f}",
    f"{row['xla_over_this']:.2f}",
    f"{row['difference']:.1g}",
  )


def _measure(wanted: Sequence[tuple[str, Spec]]) -> list[dict[str, Any]]:
  """The rows of the table, under a progress bar."""
  found: list[dict[str, Any]] = []
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description:40}"),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    console=rich.console.Console(stderr=True),
  ) as progress:
    bar = progress.add_task("", total=len(wanted))
    for name, spec in wanted:
      progress.update(bar, description=f"{name}, {spec.name}"[:40])
      measured = kernel_timing.measure(
        spec, kernel_timing.COPIED, _ROUNDS.value, inputs.SEED.value
      )
      found += rows(name, spec, *measured)
      progress.advance(bar)
  return found


if __name__ == "__main__":
  cli.run(main)
