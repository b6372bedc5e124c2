"""Times kernels with each of their options on the current device."""

import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
import rich.console

from kvjax import kernels
from kvjax.errors import InputError
from kvjax.experiments.run import (
  device_failures,
  environment,
  outputs,
  stopwatch,
  tuned_tables,
)
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.timing import kernel_checks, kernel_timing
from kvjax.experiments.timing.kernel_timing import PALLAS, XLA
from kvjax.files import is_present
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
  wanted = kernel_timing.results(spec, kernel_timing.by(spec, XLA), operands)
  candidates, timers = [], {}
  for number, options in enumerate(choices.combinations()):
    run = kernel_timing.by(spec, PALLAS)
    with kernels.use_table({kind: {choices.kernel: options}}):
      try:
        found = kernel_timing.results(spec, run, operands)
        checked = kernel_checks.compare(found, wanted)
        if found is not None and checked.fine:
          timers[number] = kernel_timing.timer(run, operands)
        said = checked.said
      except Exception as error:
        reason = device_failures.compilers(error)
        if reason is None:
          raise
        said = f"does not compile ({reason})"
    candidates.append((options, said))
  taken = stopwatch.in_turns(list(timers.values()), range(rounds))
  seconds = dict(zip(timers, taken, strict=True))
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


def check_device() -> None:
  """Refuses CPUs.

  Raises:
    InputError: there is no TPU or GPU.
  """
  if jax.default_backend() == "cpu":
    raise InputError(
      "JAX finds no TPU or GPU here, and on a CPU kernels are not used: there "
      "is nothing to tune; install jax[tpu] or jax[cuda13] on a machine that "
      "has one."
    )


def tune(
  wanted: Sequence[Choices], path: pathlib.Path, rounds: int, seed: int
) -> None:
  """Writes the fastest options of kernels into a table, and prints all.

  Args:
    wanted: choices of kernels; those of another platform are left out.
    path: the table. What it has of other devices and kernels is kept.
    rounds: see `measure`.
    seed: likewise.

  Raises:
    InputError: none of the kernels runs on this device, or the file is no table
      or cannot be written.
  """
  platform, kind = jax.default_backend(), tuning.device_kind()
  outputs.file(str(path))
  table = dict(tuned_tables.read(path)) if is_present(path) else {}
  found = False
  own = [choices for choices in wanted if choices.platform == platform]
  console = rich.console.Console(highlight=False)
  console.print(f"kernels on {environment.device()}:")
  with progress_bar(len(own)) as advance:
    for choices in own:
      label = f"{choices.kernel}, {choices.spec.name}"
      advance(label[:60], 0)
      tried = measure(choices, rounds, seed)
      best = fastest(tried)
      lines = [f"{label}:", *(_line(one, one is best) for one in tried)]
      console.print("\n".join(lines), markup=False, soft_wrap=True)
      if best is not None:
        found = True
        table[kind] = {**table.get(kind, {}), choices.kernel: best.options}
        outputs.write_json(path, table)
      advance(label[:60], 1)
  if not found:
    raise InputError(
      f"None of these kernels runs on this {kind}, and {path} is not written; "
      "TPUs and Hopper GPUs have kernels to tune."
    )
  console.print(f"{path} has the fastest, marked *.", markup=False)


def _line(tried: Tried, is_fastest: bool) -> str:
  if tried.seconds is None:
    return f"! {tried.label}: {tried.said}"
  mark = "*" if is_fastest else " "
  return f"{mark} {tried.label}: {1e3 * tried.seconds:,.3f} ms, {tried.said}"
