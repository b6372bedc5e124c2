"""Evaluates KV-cache compression on the papers' benchmarks.

  python -m kvjax.experiments.evaluate --benchmark=ruler --length=2048,3072

asks the bundled model RULER's tasks, made here, with the full cache and with
what each method keeps of it at each retention. `--benchmark=needle` and
`passkey` ask at every length and depth, `multiturn` several questions about one
context, and `longbench --data=DIR` reads LongBench from disk. `--model=DIR`
takes any model that kvjax reads.

All methods and budgets are answered from one prefill per context. A run that
was stopped goes on where it stopped; each combination of model, benchmark,
protocol, schedule and seed has a folder of its own in --output, with its
answers, tables, plots and an HTML page.
`python -m kvjax.experiments.report DIR...`
puts runs into one leaderboard.
"""

import hashlib
import pathlib
import time

import rich.console
from absl import flags

from kvjax.experiments import (
  benchmark_inputs,
  cli,
  inputs,
  method_inputs,
  reports,
  results,
  runs,
)

for module in (benchmark_inputs, inputs, method_inputs):
  flags.adopt_module_key_flags(module)

_OUTPUT = flags.DEFINE_string(
  "output", "results", "Folder for the folders of runs."
)


def main() -> None:
  """Checks what can be checked first, then loads the model and asks it."""
  began = time.monotonic()
  method_inputs.check_flags()
  chosen = method_inputs.chosen()
  benchmark_inputs.check_flags()
  output = pathlib.Path(_OUTPUT.value)
  results.check_writable(output)
  console = rich.console.Console(highlight=False)
  with inputs.loaded() as (lm, devices):
    drawn = benchmark_inputs.draw(lm)
    for note in drawn.notes:
      console.print(note)
    settings = method_inputs.settings(
      benchmark_inputs.BENCHMARK.value, drawn.data, benchmark_inputs.protocol()
    )
    folder = output / folder_name(settings)
    batch = inputs.BATCH.value
    run = runs.answer(
      lm, devices, chosen, drawn.samples, settings, folder, batch, began
    )
  run.summary["about"] = dict(drawn.about)
  console.print(reports.write_run(folder, run.summary))
  console.print(f"{run}; all in {folder}")


def folder_name(settings: results.Settings) -> str:
  """Of runs with these settings, readable and unlike that of any others."""
  digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
  parts = (settings.benchmark, settings.model, settings.protocol, digest)
  return "__".join(part.replace("/", "--") for part in parts)


if __name__ == "__main__":
  cli.run(main)
