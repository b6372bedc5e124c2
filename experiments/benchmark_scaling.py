"""Measures how methods scale with the length of a prompt.

  kvjax benchmark_scaling

scores and compacts one layer with the heads of Llama-3.1-8B by every method
that needs no second pass, at 1,024 to 16,384 tokens, and keeps a quarter. It
prints milliseconds at each length, their exponent in the length, and what
scoring allocates besides its arrays, from compiled programs, and writes
table.md and scaling.png to --output. The row `attention` is the layer's
attention to its own prompt, which comes before all scores. It takes eight
minutes on two cores; `--length=32768,131072` takes 12 GB of memory, and hours
without `--noattention`.
"""

from absl import flags

import kvjax
from kvjax.errors import InputError
from kvjax.experiments import cli, refusals
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.peers.cases import LAYER
from kvjax.experiments.report import benchmark_tables, pictures, wording
from kvjax.experiments.run import candidates, outputs
from kvjax.experiments.run.environment import device
from kvjax.experiments.timing import layer_compression, scaling

_METHODS = flags.DEFINE_list(
  "methods",
  [
    *("random", "streaming", "key_norm", "h2o", "tova", "snapkv", "adakv"),
    *("chunkkv", "keydiff", "lagkv:lag=128", "compactor", "leverage"),
    *("noncausal", "protokv", "cur"),
  ],
  "Methods to measure.",
)
_LENGTH = flags.DEFINE_list(
  "length", ["1024", "2048", "4096", "8192", "16384"], "Tokens of the prompt."
)
_RETENTION = flags.DEFINE_float(
  "retention", 0.25, "Share to keep.", lower_bound=0.0, upper_bound=1.0
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Number of timings of each.", lower_bound=1
)
_ATTENTION = flags.DEFINE_bool(
  "attention", True, "Also time the layer's attention to its own prompt."
)
flags.declare_key_flag("dtype")
_OUTPUT = flags.DEFINE_string("output", "results/scaling", "Output folder.")


def main() -> None:
  """Measures, prints a table and writes the picture."""
  refusals.refuse_no_methods("keydiff,snapkv")
  lengths = sorted(run_inputs.parse_lengths(_LENGTH.value))
  if len(lengths) < 2:
    raise InputError("--length needs two lengths or more, to see what grows.")
  budget = kvjax.Retention(_RETENTION.value)
  candidates.check_names(_METHODS.value)
  plans = {name: kvjax.get_plan(name, budget) for name in _METHODS.value}
  for name, plan in plans.items():
    layer_compression.check(name, plan)
  folder = outputs.folder(_OUTPUT.value)
  cli.announce()
  heads = (LAYER["heads"], LAYER["kv_heads"], LAYER["dim"])
  dtype = run_inputs.dtype()
  operations: dict[str, layer_compression.Operation] = {
    name: layer_compression.Compression(plan) for name, plan in plans.items()
  }
  if _ATTENTION.value:
    operations[scaling.ATTENTION] = layer_compression.Attention()
  measured = scaling.measure(operations, heads, lengths, _ROUNDS.value, dtype)
  benchmark_tables.show(
    folder,
    scaling.table(measured),
    "Milliseconds at each length, MiB at the longest, and exponents over the "
    f"longer half of the lengths; one layer with {heads[0]} query and "
    f"{heads[1]} KV heads of {heads[2]} channels, one row, "
    f"{_RETENTION.value:g} kept, {dtype} on {device(1)}, median of "
    f"{wording.count(_ROUNDS.value, 'round')}",
    code=True,
  )
  picture = folder / "scaling.png"
  outputs.write_bytes(picture, pictures.png(scaling.picture(measured)))
  print(f"The picture is {picture}.")


if __name__ == "__main__":
  cli.run(main)
