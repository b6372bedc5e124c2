"""Measures how much faster compressed caches decode.

  kvjax benchmark_decode

prefills prompts, compresses their caches and decodes the same number of tokens
from each and from the full cache. All programs are compiled first, and the
caches take turns in one process. It prints a table:

- cache MiB: allocated per prompt;
- reads: tokens that a token attends to, mean over layers and KV heads;
- ms a step: median time per token, for all rows together;
- tokens/s: of all rows together;
- × full: the full cache's time relative to this one's;
- % of bandwidth: the bytes that a step must read (the weights, and its keys
  and values) per second, relative to the reading of an array, which takes turns
  with the caches.

It writes table.md to --output. The small model takes three minutes on two
cores, half of it for compilation.

  kvjax benchmark_decode --every=128 \
    --methods=rkv,snapkv,keydiff,lagkv.kvpress,tova

times evictions while decoding instead, from --target plus --every tokens to
--target, as a percentage of the steps between them. The last column is how much
longer answers of 512 tokens or more take than those of a full cache of as many
slots: what the method observes at each step, and the evictions. Eight methods
take ten minutes.

  kvjax benchmark_decode --sizes=llama-3.1-8b \
    --length=32768 --rows=4

times a model with the sizes of a published one, random weights and random
prompts.
"""

import contextlib
import pathlib
import statistics
from collections.abc import Iterator, Mapping

from absl import flags

import kvjax
from kvjax.errors import InputError
from kvjax.experiments import cli, refusals
from kvjax.experiments.benchmarks.needle.definition import Grid, needle_samples
from kvjax.experiments.compilation.published import SHIPPED
from kvjax.experiments.inputs import budget_inputs, run_inputs
from kvjax.experiments.report import benchmark_tables, wording
from kvjax.experiments.run import outputs
from kvjax.experiments.run.candidates import FULL, candidates
from kvjax.experiments.run.environment import device
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.timing import (
  decode_timing,
  eviction_timing,
  random_models,
)
from kvjax.model import Vocabulary
from kvjax.models.pretrained import Pretrained

for name in (*run_inputs.ALONE, "seed"):
  flags.declare_key_flag(name)
flags.adopt_module_key_flags(budget_inputs)
flags.set_default(budget_inputs.RETENTION, ["0.25", "0.0625"])
flags.set_default(run_inputs.MODEL, run_inputs.REFERENCE)

_METHODS = flags.DEFINE_list(
  "methods",
  ["keydiff", "adakv", "ctkvr.512"],
  "Methods to compare with the full cache; by default, with --every, "
  f"{', '.join(eviction_timing.METHODS)}.",
)
_SIZES = flags.DEFINE_string(
  "sizes",
  None,
  "Random weights with the sizes of a published model, instead of --model: a "
  f"config.json, or one of {', '.join(SHIPPED)}.",
)
_EVERY = flags.DEFINE_integer(
  "every",
  None,
  "Time evictions while decoding, one after so many tokens.",
  lower_bound=1,
)
_TARGET = flags.DEFINE_integer(
  "target", 1024, "With --every, tokens that evictions keep.", lower_bound=1
)
_LENGTH = flags.DEFINE_integer(
  "length", 3584, "Tokens of a prompt; --tokens come after it.", lower_bound=1
)
_ROWS = flags.DEFINE_integer("rows", 16, "Prompts per batch.", lower_bound=1)
_TOKENS = flags.DEFINE_integer(
  "tokens", 64, "Tokens to decode per prompt.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Number of timings per cache.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", "results/decode", "Output folder.")


def main() -> None:
  """Times decoding from each cache in turns."""
  refusals.refuse_no_methods("keydiff,flat")
  refusals.refuse_together(
    "every",
    ["retention", "budget", "length", "tokens"],
    "evictions start from --target plus --every tokens, and keep --target",
  )
  if _TARGET.present and not _EVERY.present:
    raise InputError("--target is for --every.")
  budgets = budget_inputs.budgets()
  folder = outputs.folder(_OUTPUT.value)
  cli.announce()
  if _EVERY.value is not None:
    _time_evictions(_EVERY.value, folder)
    return
  chosen = candidates(
    [FULL, *_METHODS.value], budgets, seed=run_inputs.SEED.value
  )
  with _loaded() as (lm, devices):
    length, tokens = _LENGTH.value, _TOKENS.value
    _check_room(lm, {"length": length, "tokens": tokens})
    contexts = _contexts(lm, length, _ROWS.value)
    bandwidth, decoded = decode_timing.measure(
      lm, chosen, contexts, tokens, _ROUNDS.value
    )
  benchmark_tables.show(
    folder,
    decode_timing.table(bandwidth, decoded, _ROWS.value),
    f"{wording.count(_ROWS.value, 'context')} of up to "
    f"{contexts.lengths.max():,} tokens, "
    f"{wording.count(tokens, 'token')} each, {run_inputs.dtype()} on "
    f"{device(devices)}, median of {wording.count(_ROUNDS.value, 'round')}; "
    "an array was read at "
    f"{benchmark_tables.speeds([bandwidth.bytes_per_second])}",
    code=True,
  )


def _time_evictions(every: int, folder: pathlib.Path) -> None:
  """Times evictions by each method, and the steps between them."""
  target = _TARGET.value
  plans = {
    name: eviction_timing.plan_of(name, target, every, run_inputs.SEED.value)
    for name in (
      _METHODS.value if _METHODS.present else eviction_timing.METHODS
    )
  }
  with _loaded() as (lm, devices):
    _check_room(lm, {"target": target, "every": every})
    steps, evicted = eviction_timing.measure(
      lm,
      plans,
      # Prose has a few tokens less than it is asked for.
      _contexts(lm, 2 * (target + every), _ROWS.value),
      (target, every),
      _ROUNDS.value,
    )
  step = statistics.median(steps)
  benchmark_tables.show(
    folder,
    eviction_timing.table(steps, evicted, every),
    f"From {target + every:,} to {target:,} tokens, every "
    f"{wording.count(every, 'token')} of {1e3 * step:,.1f} ms each; "
    f"{run_inputs.model_name()}, "
    f"{wording.count(_ROWS.value, 'row')}, {run_inputs.dtype()} on "
    f"{device(devices)}, median of {wording.count(_ROUNDS.value, 'round')}",
    code=True,
  )


@contextlib.contextmanager
def _loaded() -> Iterator[tuple[Pretrained, int]]:
  """Loads or draws the model; yields it and the number of devices."""
  if _SIZES.value is None:
    with run_inputs.loaded() as loaded:
      yield loaded
    return
  for name in ("model", "mesh"):
    if flags.FLAGS[name].present:
      raise InputError(
        f"--sizes draws weights of its own on one device; leave out --{name}."
      )
  with run_inputs.chosen_kernels():
    yield random_models.with_sizes(_SIZES.value, run_inputs.dtype()), 1


def _check_room(lm: Pretrained, given: Mapping[str, int]) -> None:
  """Refuses flags whose tokens together exceed the model's context."""
  total, limit = sum(given.values()), lm.model.geometry.max_positions
  if total > limit:
    flags_of = " and ".join(f"--{name}={n}" for name, n in given.items())
    raise InputError(
      f"{flags_of} come to {total} tokens; the context of this model is "
      f"{limit}."
    )


def _contexts(lm: Pretrained, length: int, rows: int) -> kvjax.Prompts:
  """Draws prose with a needle, different in each row, or tokens at random."""
  if lm.tokenizer is None:
    if not isinstance(lm.model, Vocabulary):
      raise InputError(
        f"{type(lm.model).__name__} has neither a tokenizer nor a "
        "`vocab_size`, below which tokens are drawn; give it one of them."
      )
    ids, seed = lm.model.vocab_size, run_inputs.SEED.value
    return random_models.prompts(ids, rows, length, seed)
  grid = Grid([length], [0.5], rows, run_inputs.SEED.value, lm.text.count)
  (drawn,) = needle_samples(grid).values()
  prompts = [Prompt.of_sample(lm.text, sample) for sample in drawn]
  return kvjax.Prompts.of([prompt.context for prompt in prompts])


if __name__ == "__main__":
  cli.run(main)
