"""Compares kernels with XLA's programs on the current device."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.experiments.run import device_failures
from kvjax.experiments.timing import kernel_timing
from kvjax.experiments.timing.kernel_timing import PALLAS, XLA
from kvjax.kernels.specs import Spec

# Of the largest number. Kernels sum in another order, and round weights to the
# dtype of values, of which bfloat16 has 8 bits.
_TOLERANCE = 1e-2


class Checked(NamedTuple):
  """The outcome of a kernel at the sizes of a spec.

  Attributes:
    fine: whether the results agree; true if the kernel declines.
    said: the outcome in words.
  """

  fine: bool
  said: str


def check(spec: Spec, seed: int) -> Checked:
  """Runs a spec by its kernel and by XLA, and compares all outputs.

  Integers, such as slots, must be equal, and other numbers nearly.
  """
  operands = jax.jit(spec.arrays)(jax.random.key(seed))
  wanted = kernel_timing.results(spec, kernel_timing.by(spec, XLA), operands)
  try:
    found = kernel_timing.results(
      spec, kernel_timing.by(spec, PALLAS), operands
    )
  except Exception as error:
    said = device_failures.of_kernel(error)
    if said is None:
      raise
    return Checked(False, said)
  return compare(found, wanted)


def compare(
  found: PyTree[np.ndarray] | None, wanted: PyTree[np.ndarray]
) -> Checked:
  """Compares a kernel's results with XLA's.

  Args:
    found: the kernel's; None if it declines.
    wanted: XLA's.
  """
  if found is None:
    return Checked(True, "declines")
  pairs = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
  differences = [
    (kernel_timing.difference([one], [other]), other.dtype.kind in "iub")
    for one, other in pairs
  ]
  fine = all(
    # Not a number if one side has no number.
    difference <= (0 if exact else _TOLERANCE)
    for difference, exact in differences
  )
  # NumPy's maximum is not a number if one of them is not.
  largest = np.max([difference for difference, _ in differences], initial=0.0)
  return Checked(fine, f"differs by {largest:.1g}" if largest else "equal")
