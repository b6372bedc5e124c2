"""Times retrieval beside full attention, in one layer.

  kvjax benchmark_sparse

decodes tokens from the cache of one layer, with the heads of Llama-3.1-8B and
random keys, at 8,192 and 32,768 tokens: once with all keys, and with those that
each method retrieves. All take turns in one process, and the ratio to the full
cache is that of the same run. It takes four minutes on two cores, most of it to
index. `--length=131072` takes half an hour and 8 GB of memory. It writes
table.md to --output.
"""

from absl import flags

from kvjax.experiments import cli, refusals
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.report import benchmark_tables, wording
from kvjax.experiments.run import outputs
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
for name in ("dtype", "seed"):
  flags.declare_key_flag(name)
_OUTPUT = flags.DEFINE_string("output", "results/sparse", "Output folder.")


def main() -> None:
  """Times all methods at each length."""
  refusals.refuse_no_methods("ctkvr,quest")
  retrievals = {name: get_retrieval(name) for name in _METHODS.value}
  lengths = run_inputs.parse_lengths(_LENGTH.value)
  folder = outputs.folder(_OUTPUT.value)
  cli.announce()
  heads = sparse_timing.Heads(dtype=run_inputs.dtype())
  measured = {
    length: sparse_timing.measure(
      retrievals,
      _KEYS.value,
      length,
      heads,
      _ROUNDS.value,
      run_inputs.SEED.value,
    )
    for length in lengths
  }
  speeds = [one.bytes_per_second for one, _ in measured.values()]
  benchmark_tables.show(
    folder,
    sparse_timing.table({n: found for n, (_, found) in measured.items()}),
    f"{_KEYS.value:,} keys retrieved in one layer with {heads.heads} query and "
    f"{heads.kv_heads} KV heads of {heads.head_dim} channels, one row, "
    f"{heads.dtype} on {device(1)}, median of "
    f"{wording.count(_ROUNDS.value, 'round')}, seed {run_inputs.SEED.value}; "
    f"an array was read at {benchmark_tables.speeds(speeds)}",
    code=True,
  )


if __name__ == "__main__":
  cli.run(main)
