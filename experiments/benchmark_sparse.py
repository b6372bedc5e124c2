"""Times retrieval against attention to the full cache, one layer at a time.

  kvjax benchmark_sparse

decodes tokens from the cache of one layer, with the heads of Llama-3.1-8B and
random keys, at 8,192 and 32,768 tokens: once with all keys, and with those that
each method retrieves. All take turns in one process, and the ratio to the full
cache is that of the same run. It takes four minutes on two cores, most of it to
index. `--length=131072` takes half an hour and 8 GB of memory.
"""

import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.report import formats, wording
from kvjax.experiments.run.environment import device
from kvjax.experiments.timing import sparse_timing
from kvjax.registry.names import get_retrieval

_METHODS = flags.DEFINE_list(
  "methods", ["ctkvr", "quest", "shadowkv"], "Retrieval methods."
)
_KEYS = flags.DEFINE_integer(
  "keys", 512, "Keys that a token retrieves.", lower_bound=1
)
_LENGTH = flags.DEFINE_list(
  "length", ["8192", "32768"], "Tokens of the prompt."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Number of timings per cache.", lower_bound=1
)
flags.declare_key_flag("seed")


def main() -> None:
  """Prints a table for each length."""
  if not _METHODS.value:
    raise InputError("--methods is empty; ctkvr,quest would be two.")
  retrievals = {name: get_retrieval(name) for name in _METHODS.value}
  lengths = run_inputs.parse_lengths(_LENGTH.value)
  console = rich.console.Console(highlight=False)
  heads = sparse_timing.Heads()
  for length in lengths:
    copies, results = sparse_timing.measure(
      retrievals,
      _KEYS.value,
      length,
      heads,
      _ROUNDS.value,
      run_inputs.SEED.value,
    )
    heading, *lines = sparse_timing.table(copies, results)
    title = f"{length:,} tokens, {_KEYS.value:,} keys retrieved"
    console.print(formats.Table(title, heading, lines))
  console.print(
    f"One layer with {heads.heads} query and {heads.kv_heads} KV heads of "
    f"{heads.head_dim} channels, one row, float32 on {device(1)}, median of "
    f"{wording.count(_ROUNDS.value, 'round')}, seed "
    f"{run_inputs.SEED.value}."
  )


if __name__ == "__main__":
  cli.run(main)
