"""Times a kernel with each of its options on the current device."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax

from kvjax import kernels
from kvjax.experiments.run import kernel_failures
from kvjax.experiments.timing import kernel_checks, kernel_timing
from kvjax.experiments.timing.kernel_timing import PALLAS, XLA
from kvjax.kernels import tuning
from kvjax.kernels.specs import Choices


class Tried(NamedTuple):
  """The outcome of a candidate.

  Attributes:
    options: its options.
    said: how its results differ from those of XLA, or why it has none.
    seconds: per use, in the median round; None if it cannot be chosen.
  """

  options: dict[str, int]
  said: str
  seconds: float | None

  @property
  def label(self) -> str:
    """The options in words, as `read=2048, write=1024`."""
    return ", ".join(f"{name}={value}" for name, value in self.options.items())


def measure(choices: Choices, rounds: int, seed: int) -> list[Tried]:
  """Checks every candidate against XLA, and times those that are right.

  Args:
    choices: the kernel's.
    rounds: number of timings of each candidate, by turns.
    seed: seed of the operands.
  """
  spec, kind = choices.spec, tuning.device_kind()
  operands = jax.jit(spec.arrays)(jax.random.key(seed))
  wanted = kernel_timing.results(kernel_timing.by(spec, XLA), operands)
  candidates, timers = [], {}
  for number, options in enumerate(choices.combinations()):
    run = kernel_timing.by(spec, PALLAS)
    with kernels.use_table({kind: {choices.kernel: options}}):
      try:
        found = kernel_timing.results(run, operands)
        checked = kernel_checks.compare(found, wanted)
        if found is not None and checked.fine:
          timers[number] = kernel_timing.timer(run, operands)
        said = checked.said
      except Exception as error:
        reason = kernel_failures.compilers(error)
        if reason is None:
          raise
        said = f"does not compile ({reason})"
    candidates.append((options, said))
  seconds: dict[int, list[float]] = {number: [] for number in timers}
  for _ in range(rounds):
    for number, timer in timers.items():
      seconds[number].append(timer())
  return [
    Tried(
      options,
      said,
      statistics.median(seconds[number]) if number in seconds else None,
    )
    for number, (options, said) in enumerate(candidates)
  ]


def fastest(tried: Sequence[Tried]) -> Tried | None:
  """Returns the fastest candidate; None if none can be chosen."""
  timed = [(one.seconds, one) for one in tried if one.seconds is not None]
  return min(timed, key=lambda pair: pair[0])[1] if timed else None
