"""Measures what a sweep saves: all methods and budgets from one prefill.

  python -m experiments.benchmark_sweep

answers one needle question from the caches of 10 methods at 4 retentions, all
from one prefill, and then the same 40 one after another, each with a prefill of
its own; both compiled before, in turns, in one process. Prints the ratio of
their times and checks that they answer the same. Takes three minutes on two
cores, most of them to compile.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np
import rich.console
import rich.progress
from absl import flags

import models
from experiments import cli, inputs
from experiments.answering import Prompt, Reply, Seconds, Shape, replies
from experiments.benchmarks import grids
from experiments.candidates import Candidate, candidates, parse_budgets
from experiments.reports import device
from kvjax.errors import InputError

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
  "Methods that are swept.",
)
_RETENTION = flags.DEFINE_list(
  "retention", ["0.5", "0.25", "0.1", "0.05"], "Shares of the context to keep."
)
_LENGTH = flags.DEFINE_integer(
  "length", 4000, "Tokens of prompt and answer.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "How often each side is timed.", lower_bound=1
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
      [_LENGTH.value], [0.5], 1, inputs.SEED.value, lm.tokenizer.count
    ).values()
    (sample,) = drawn
    prompt = Prompt.of_sample(lm.tokenizer, sample)
    together, apart = _measure(lm, chosen, prompt)
  ratios = np.array(apart) / np.array(together)
  console = rich.console.Console(highlight=False)
  console.print(
    f"{len(chosen)} caches of {len(prompt.context)} tokens, {inputs.dtype()} "
    f"on {device(devices)}, median of {_ROUNDS.value} rounds:\n"
    f"  one sweep            {statistics.median(together):8.3f} s\n"
    f"  one after another    {statistics.median(apart):8.3f} s\n"
    f"  ratio                {np.median(ratios):8.1f}   "
    f"({ratios.min():.1f} to {ratios.max():.1f})"
  )


def _measure(
  lm: models.Pretrained, chosen: Sequence[Candidate], prompt: Prompt
) -> tuple[list[float], list[float]]:
  """Seconds of each round: of the sweep, and of its parts one by one."""
  shape = Shape.of([prompt], 1)

  def ask(some: Sequence[Candidate]) -> list[Reply]:
    found = replies(lm, some, [[prompt]], shape, Seconds())
    return [reply for group in found for reply in group]

  def timed(groups: Sequence[Sequence[Candidate]]) -> float:
    began = time.perf_counter()
    for group in groups:
      ask(group)
    return time.perf_counter() - began

  alone = [[candidate] for candidate in chosen]
  console = rich.console.Console(stderr=True)
  with console.status("compiling the sweep"):
    swept = {(r.candidate, r.text) for r in ask(chosen)}
  singly = rich.progress.track(alone, "compiling each alone", console=console)
  same = {(r.candidate, r.text) for group in singly for r in ask(group)}
  if swept != same:
    raise InputError(
      "A sweep answers otherwise than its methods alone: rounding decides "
      "between tokens; compare with --dtype=float32."
    )
  together, apart = [], []
  rounds = range(_ROUNDS.value)
  for _ in rich.progress.track(rounds, "timing", console=console):
    together.append(timed([chosen]))
    apart.append(timed(alone))
  return together, apart


if __name__ == "__main__":
  cli.run(main)
