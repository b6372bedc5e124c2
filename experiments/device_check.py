"""Checks the kernels on the device at hand.

  kvjax device_check

runs every kernel at the sizes of its specs.py on a TPU or GPU and compares its
results with those of XLA's program. It prints a line for each, and exits with
code 1 if a kernel does not compile or has other results: slots and other
integers must be equal, other numbers within 1 % of the largest one.
`--kernels=NAME:xla` replaces such a kernel in all programs. Alone it has not
been timed: an H200 took less than twelve minutes for it and some timings.
--only=select,gather checks some operations, and --kernels_table=FILE what
`kvjax tune` has chosen.
"""

import sys

import jax
import rich.console
from absl import flags

from kvjax.errors import InputError
from kvjax.experiments import cli
from kvjax.experiments.inputs import run_inputs
from kvjax.experiments.run import environment
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.timing import kernel_checks, kernel_tables
from kvjax.kernels import OPERATIONS
from kvjax.kernels.specs import named_specs

_ONLY = flags.DEFINE_list(
  "only", list(OPERATIONS), "Names of the operations to check."
)
for name in ("seed", "kernels_table"):
  flags.declare_key_flag(name)

DIFFERENT = 1


def main() -> None:
  """Checks all flags, then the kernels."""
  wanted = kernel_tables.chosen(list(named_specs()), _ONLY.value)
  if jax.default_backend() == "cpu":
    raise InputError(
      "JAX finds no TPU or GPU here, and on a CPU kernels are not used; "
      "install jax[tpu] or jax[cuda13] on a machine that has one."
    )
  cli.announce()
  console = rich.console.Console(highlight=False)
  console.print(f"kernels on {environment.device()}:")
  different = 0
  with run_inputs.chosen_table(), progress_bar(len(wanted)) as advance:
    for name, spec in wanted:
      label = f"{name}, {spec.name}"
      advance(label[:60], 0)
      checked = kernel_checks.check(spec, run_inputs.SEED.value)
      different += not checked.fine
      mark = " " if checked.fine else "!"
      line = f"{mark} {label}: {checked.said}"
      console.print(line, markup=False, soft_wrap=True)
      advance(label[:60], 1)
  if different:
    console.print(f"{different} of {len(wanted)} are not as they should be.")
    sys.exit(DIFFERENT)
  console.print(f"All {len(wanted)} are as they should be.")


if __name__ == "__main__":
  cli.run(main)
