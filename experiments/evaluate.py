"""Evaluates KV-cache compression on the papers' benchmarks.

  kvjax evaluate --benchmark=ruler --length=2048,3072

runs RULER's tasks, generated locally, on SmolLM2-135M-Instruct, which is
fetched once, with the full cache and with each method at each retention.
`--benchmark=needle` and `passkey` cover every length and depth, `multiturn`
asks several questions about one context, and `longbench --data=DIR` reads
LongBench from disk. `math500`, `aime25` and `arithmetic` have short prompts and
long answers, for --every and --budget.
`--model=DIR` loads any model that kvjax supports.

A run takes minutes to hours. It first says how many answers it will generate
and, from the speed of the device, roughly how long that takes. `--dry_run`
measures two contexts instead, and stops.

All methods and budgets share one prefill per context. An interrupted run
resumes where it stopped. With `--multihost`, hosts that run the same command
share the contexts. Each combination of model, benchmark, protocol, schedule and
seed has its own folder in --output, with answers, tables, plots and an HTML
page. `kvjax leaderboard DIR...` merges runs into one leaderboard. With
--timed_rounds, tables also say how long each method and budget takes for one
prompt alone, and for a decoded token.
"""

import hashlib
import time

from absl import flags

from kvjax.experiments import cli
from kvjax.experiments.inputs import (
  benchmark_inputs,
  dry_run_inputs,
  host_inputs,
  method_inputs,
  run_inputs,
  speed_inputs,
)
from kvjax.experiments.report import run_files, writing
from kvjax.experiments.run import outputs, results, runner
from kvjax.experiments.run.sentences import say

for module in (
  benchmark_inputs,
  run_inputs,
  method_inputs,
  host_inputs,
  speed_inputs,
):
  flags.adopt_module_key_flags(module)

_OUTPUT = flags.DEFINE_string(
  "output",
  "results",
  "Parent folder of the run folders, or an address as gs://bucket/results.",
)


def main() -> None:
  """Checks all flags, then loads the model and runs it."""
  began = time.monotonic()
  speed_inputs.check()
  method_inputs.check_flags()
  chosen = method_inputs.chosen()
  benchmark_inputs.check_flags()
  output = _OUTPUT.value
  outputs.check_run(output, writes=not dry_run_inputs.DRY_RUN.value)
  console = host_inputs.console()
  with run_inputs.loaded() as (lm, devices):
    drawn = benchmark_inputs.draw(lm)
    for note in drawn.notes:
      say(note)
    settings = method_inputs.settings(
      benchmark_inputs.chosen().name, drawn.data, benchmark_inputs.protocol()
    )
    folder = outputs.run_folder(output, folder_name(settings))
    samples, batch = drawn.samples, run_inputs.batch()
    job = runner.Job(lm, devices, chosen, samples, settings, folder, batch)
    run = speed_inputs.answered(job, began, console)
  if run is None:
    return
  run.summary["about"] = {**run_files.notes(folder), **drawn.about}
  console.print(writing.write_run(folder, run.summary))
  say(f"{run}; all in {folder}")


def folder_name(settings: results.Settings) -> str:
  """Names the folder of runs with these settings, readable and unique."""
  digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
  parts = (settings.benchmark, settings.model, settings.protocol, digest)
  return "__".join(part.replace("/", "--") for part in parts)


if __name__ == "__main__":
  cli.run(main, sends=True, connect=host_inputs.start)
