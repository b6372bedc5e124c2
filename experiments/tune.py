"""Chooses block sizes of kernels for the device at hand.

  kvjax tune
  kvjax compare --kernels_table=results/kernels_table.json

runs every kernel that leaves a choice with each of its block sizes, or other
options, at the size of a real model. Those that do not compile, or whose
results are not XLA's, are named and left out. The others take turns, and the
fastest go into a table by kind of device, which programs take as
`--kernels_table`. A table that is there is kept but for what is measured.
Most of the time goes into compiling; how many minutes that is in all has not
been measured. --output=kernels/tuning.json, in a checkout, changes the table
that comes with kvjax.
"""

import pathlib

from absl import flags

from kvjax.experiments import cli
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.timing import kernel_choices, kernel_tables
from kvjax.kernels import OPERATIONS
from kvjax.kernels.specs import all_choices

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
  wanted = [choices for _, choices in kernel_tables.chosen(named, _ONLY.value)]
  kernel_choices.check_device()
  cli.announce()
  kernel_choices.tune(
    wanted, pathlib.Path(_OUTPUT.value), _ROUNDS.value, run_inputs.SEED.value
  )


if __name__ == "__main__":
  cli.run(main)
