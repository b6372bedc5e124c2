"""Measures how much sooner tokens come from a compressed cache.

  python -m kvjax.experiments.benchmark_decode

prefills prompts, compresses their caches and decodes from each, and from the
full one, as many tokens as asked; all compiled before, in turns, in one
process. Prints a table:

- cache MiB: allocated for a prompt;
- reads: tokens that a token attends to, mean over layers and KV heads;
- ms a step: median time in which every row gets a token;
- tokens/s: of all rows together;
- × full: the full cache's time over this one's;
- % of copies: the bytes that a step must move, which are the weights and what
  is read, over the step's time, as a share of what copies beside it reach. They
  write as much as they read, so that a step may exceed 100.

Takes three minutes on two cores, half of them to compile.
"""

import rich.box
import rich.console
import rich.table
from absl import flags

import kvjax
from kvjax.errors import InputError
from kvjax.experiments import cli, decode_timing, inputs
from kvjax.experiments.answering import Prompt
from kvjax.experiments.benchmarks import grids
from kvjax.experiments.candidates import FULL, candidates, parse_budgets
from kvjax.experiments.reporting import wording
from kvjax.experiments.reports import device
from kvjax.models.pretrained import Pretrained

flags.adopt_module_key_flags(inputs)

_METHODS = flags.DEFINE_list(
  "methods",
  ["keydiff", "adakv", "ctkvr", "flat"],
  "Methods that are compared with the full cache.",
)
_RETENTION = flags.DEFINE_list(
  "retention", ["0.25", "0.0625"], "Shares of the context to keep or look up."
)
_LENGTH = flags.DEFINE_integer(
  "length", 3584, "Tokens of prompt and answer.", lower_bound=1
)
_ROWS = flags.DEFINE_integer(
  "rows", 16, "Prompts that are decoded together.", lower_bound=1
)
_TOKENS = flags.DEFINE_integer(
  "tokens", 64, "Tokens that each of them gets.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "How often each cache is timed.", lower_bound=1
)


def main() -> None:
  """Times decoding from each cache in turns."""
  budgets = parse_budgets(_RETENTION.value, None)
  chosen = candidates([FULL, *_METHODS.value], budgets)
  with inputs.loaded() as (lm, devices):
    length, tokens = _LENGTH.value, _TOKENS.value
    limit = lm.config.geometry.max_positions
    if length + tokens > limit:
      raise InputError(
        f"--length={length} and --tokens={tokens} come to {length + tokens} "
        f"tokens; the context of this model is {limit}."
      )
    contexts = _contexts(lm, length, _ROWS.value)
    copies, found = decode_timing.measure(
      lm, chosen, contexts, tokens, _ROUNDS.value
    )
  heading, *lines = decode_timing.table(copies, found, _ROWS.value)
  shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  for number, name in enumerate(heading):
    shown.add_column(name, justify="right" if number else "left")
  for line in lines:
    shown.add_row(*line)
  rich.console.Console(highlight=False).print(
    shown,
    f"{wording.count(_ROWS.value, 'context')} of up to "
    f"{contexts.lengths.max()} tokens, "
    f"{wording.count(tokens, 'token')} each, {inputs.dtype()} on "
    f"{device(devices)}, median of {wording.count(_ROUNDS.value, 'round')}; "
    f"copies moved {copies.bytes_per_second / 1e9:.1f} GB/s.",
  )


def _contexts(lm: Pretrained, length: int, rows: int) -> kvjax.Prompts:
  """Prose with a needle, another one in each row."""
  (drawn,) = grids.needle_samples(
    [length], [0.5], rows, inputs.SEED.value, lm.text.count
  ).values()
  prompts = [Prompt.of_sample(lm.text, sample) for sample in drawn]
  return kvjax.Prompts.of([prompt.context for prompt in prompts])


if __name__ == "__main__":
  cli.run(main)
