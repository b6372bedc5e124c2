"""Measures the time that sharing one prefill saves.

  kvjax benchmark_sweep

answers one needle question from the caches of 10 methods at 4 retentions, first
with one shared prefill and then with a prefill for each of the 40 caches. Both
are compiled first and take turns in one process. It prints the ratio of their
times, checks that the answers agree, and writes table.md to --output. It takes
three minutes on two cores, most of it for compilation.
"""

from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.benchmarks.needle.definition import Grid, needle_samples
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.report import benchmark_tables, wording
from kvjax.experiments.run import outputs
from kvjax.experiments.run.candidates import candidates, parse_budgets
from kvjax.experiments.run.environment import device
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.timing import sweep_timing

for name in (*run_inputs.ALONE, "seed"):
  flags.declare_key_flag(name)
flags.set_default(run_inputs.MODEL, run_inputs.REFERENCE)

_METHODS = flags.DEFINE_list(
  "methods",
  [
    *("random", "streaming", "key_norm", "keydiff", "lagkv:lag=128"),
    *("compactor", "tova", "snapkv", "h2o", "pyramidkv"),
  ],
  "Methods to sweep.",
)
_RETENTION = flags.DEFINE_list(
  "retention", ["0.5", "0.25", "0.1", "0.05"], "Shares of the context to keep."
)
_LENGTH = flags.DEFINE_integer(
  "length", 4000, "Tokens of prompt and answer.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Number of timings per variant.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", "results/sweep", "Output folder.")


def main() -> None:
  """Times a sweep and its parts in turns."""
  budgets = parse_budgets(_RETENTION.value, None)
  seed = run_inputs.SEED.value
  chosen = candidates(_METHODS.value, budgets, seed=seed)[1:]
  if not chosen:
    raise InputError("Only the full cache is left; name methods and budgets.")
  folder = outputs.folder(_OUTPUT.value)
  cli.announce()
  with run_inputs.loaded() as (lm, devices):
    run_inputs.check_lengths(lm, [_LENGTH.value])
    grid = Grid([_LENGTH.value], [0.5], 1, seed, lm.text.count)
    ((sample,),) = needle_samples(grid).values()
    prompt = Prompt.of_sample(lm.text, sample)
    timing = sweep_timing.measure(lm, chosen, prompt, _ROUNDS.value)
  benchmark_tables.show(
    folder,
    sweep_timing.table(
      f"{len(chosen)} of {len(prompt.context):,} tokens", timing
    ),
    f"{run_inputs.model_name()}, {run_inputs.dtype()} on {device(devices)}, "
    f"median of {wording.count(_ROUNDS.value, 'round')}",
  )


if __name__ == "__main__":
  cli.run(main)
