"""Measures the time that a sweep saves by sharing one prefill.

  python -m kvjax.experiments.benchmark_sweep

answers one needle question from the caches of 10 methods at 4 retentions, first
with one shared prefill and then with a prefill for each of the 40 caches. Both
are compiled first and take turns in one process. It prints the ratio of their
times and checks that the answers agree. It takes three minutes on two cores,
most of it for compilation.
"""

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli, inputs, sweep_timing
from kvjax.experiments.answering import Prompt
from kvjax.experiments.benchmarks import grids
from kvjax.experiments.candidates import candidates, parse_budgets
from kvjax.experiments.reporting import wording
from kvjax.experiments.reports import device

flags.adopt_module_key_flags(inputs)

_METHODS = flags.DEFINE_list(
  "methods",
  [
    "random",
    "streaming",
    "key_norm",
    "keydiff",
    "lagkv:lag=128",
    "compactor",
    "tova",
    "snapkv",
    "h2o",
    "pyramidkv",
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


def main() -> None:
  """Times a sweep and its parts in turns."""
  budgets = parse_budgets(_RETENTION.value, None)
  chosen = candidates(_METHODS.value, budgets)[1:]
  if not chosen:
    raise InputError("Only the full cache is left; name methods and budgets.")
  with inputs.loaded() as (lm, devices):
    inputs.check_lengths(lm, [_LENGTH.value])
    (drawn,) = grids.needle_samples(
      [_LENGTH.value], [0.5], 1, inputs.SEED.value, lm.text.count
    ).values()
    (sample,) = drawn
    prompt = Prompt.of_sample(lm.text, sample)
    timing = sweep_timing.measure(lm, chosen, prompt, _ROUNDS.value)
  console = rich.console.Console(highlight=False)
  console.print(
    f"{len(chosen)} caches of {len(prompt.context)} tokens, {inputs.dtype()} "
    f"on {device(devices)}, median of "
    f"{wording.count(_ROUNDS.value, 'round')}:\n{timing}"
  )


if __name__ == "__main__":
  cli.run(main)
