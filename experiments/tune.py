"""Chooses the block sizes of kernels for the TPU or GPU at hand.

  kvjax tune
  kvjax compare --kernels_table=results/kernels_table.json

runs every kernel that leaves a choice with each of its block sizes, or other
options, at the size of a real model. Those that do not compile, or whose
results are not XLA's, are named and left out. The others take turns, and the
fastest go into a table by kind of device, which programs take as
`--kernels_table`. A table that is there is kept but for what is measured.
--output=kernels/tuning.json, in a checkout, changes the table that comes with
kvjax.
"""

import pathlib

import jax
import rich.console
from absl import flags

from kvjax import files
from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.run import environment, outputs, tuned_tables
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.timing import kernel_choices, kernel_tables
from kvjax.kernels import OPERATIONS, tuning
from kvjax.kernels.specs import all_choices
from kvjax.models.json_files import is_present

_ONLY = flags.DEFINE_list(
  "only", list(OPERATIONS), "Names of the operations to tune."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Number of timings per candidate.", lower_bound=1
)
flags.declare_key_flag("seed")
_OUTPUT = flags.DEFINE_string(
  "output", "results/kernels_table.json", "Output file."
)


def main() -> None:
  """Checks all flags, then tunes the kernels."""
  named = [(choices.operation, choices) for choices in all_choices()]
  wanted = kernel_tables.chosen(named, _ONLY.value)
  path = pathlib.Path(_OUTPUT.value)
  files.check_replaceable(path)
  read = tuned_tables.read(path) if is_present(path) else {}
  platform, kind = jax.default_backend(), tuning.device_kind()
  if platform == "cpu":
    raise InputError(
      "JAX finds no TPU or GPU here, and on a CPU kernels are not used: there "
      "is nothing to tune; install jax[tpu] or jax[cuda13] on a machine that "
      "has one."
    )
  own = [choices for _, choices in wanted if choices.platform == platform]
  console = rich.console.Console(highlight=False)
  console.print(f"kernels on {environment.device()}:")
  entry = dict(read.get(kind, {}))
  written = 0
  with progress_bar(len(own)) as advance:
    for choices in own:
      label = f"{choices.kernel}, {choices.spec.name}"
      advance(label[:60], 0)
      tried = kernel_choices.measure(
        choices, _ROUNDS.value, run_inputs.SEED.value
      )
      fastest = kernel_choices.fastest(tried)
      lines = [f"{label}:", *(_line(one, one is fastest) for one in tried)]
      console.print("\n".join(lines), markup=False, soft_wrap=True)
      if fastest is not None:
        entry[choices.kernel] = fastest.options
        written += 1
      advance(label[:60], 1)
  if not written:
    raise InputError(
      f"None of these kernels runs on this {kind}, and {path} is not written; "
      "TPUs and Hopper GPUs have kernels to tune."
    )
  outputs.write_json(path, {**read, kind: entry})
  console.print(f"{path} has the fastest.")


def _line(tried: kernel_choices.Tried, fastest: bool) -> str:
  if tried.seconds is None:
    return f"! {tried.label}: {tried.said}"
  mark = "*" if fastest else " "
  return f"{mark} {tried.label}: {1e3 * tried.seconds:,.3f} ms, {tried.said}"


if __name__ == "__main__":
  cli.run(main)
