"""Times operations on the current device, relative to its bandwidth."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax import kernels
from kvjax.experiments.run import stopwatch
from kvjax.kernels.specs import Spec

XLA: kernels.Implementation = "xla"
PALLAS: kernels.Implementation = "pallas"
LIBRARY = "library"

# Bytes of the array to read: larger than any cache of a chip.
READ = 2**29

# Seconds per round of a program, long compared with a launch.
_SECONDS = 0.1
_MOST = 10_000

_Seconds = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Timed:
  """The timing of a program of a spec.

  Attributes:
    program: XLA, PALLAS or LIBRARY.
    seconds: seconds per use in each round; None if the kernel declines.
    ideal_bytes: bytes that must move.
    difference: maximum difference from XLA's result, relative to its largest
      number; 0 if all are equal.
  """

  program: str
  seconds: Sequence[float] | None
  ideal_bytes: int
  difference: float

  @property
  def bytes_per_second(self) -> float | None:
    """Bandwidth of the bytes that must move, in the median round."""
    if self.seconds is None:
      return None
    return self.ideal_bytes / statistics.median(self.seconds)


class Bandwidth(NamedTuple):
  """What reading one array takes, timed in turns with the programs.

  Attributes:
    nbytes: bytes read.
    seconds: seconds per reading in each round.
  """

  nbytes: int
  seconds: Sequence[float]

  @property
  def bytes_per_second(self) -> float:
    """Bytes per second in the median round."""
    return self.nbytes / statistics.median(self.seconds)


def reading(nbytes: int) -> Callable[[], float]:
  """Returns a function that times `read`, in seconds."""
  return timer(read, (readable(nbytes),))


def readable(nbytes: int) -> Float[Array, "R 1024"]:
  """Returns an array to read, a multiple of 4 KiB.

  It is not of zeros, whose pages the system may share.
  """
  return jnp.ones((nbytes // 4096, 1024), jnp.float32)


def read(array: Float[Array, "R C"]) -> Float[Array, " R"]:
  """Reads an array as fast as XLA can.

  Copies are no measure: on CPUs, what they write is new memory, which the
  system clears first. The sum of all numbers takes up to a quarter longer.
  """
  return jnp.max(array, axis=1)


def measure(
  spec: Spec, nbytes: int, rounds: int, seed: int
) -> tuple[Bandwidth, list[Timed]]:
  """Times every program of a spec and the reading of an array, in turns.

  Args:
    spec: the operation and its shapes.
    nbytes: bytes of the array to read.
    rounds: number of timings of each.
    seed: seed of the operands.
  """
  operands = jax.jit(spec.arrays)(jax.random.key(seed))
  results_of = {
    name: results(spec, run, operands) for name, run in _programs(spec)
  }
  served = {
    name: timer(run, operands)
    for name, run in _programs(spec)
    if results_of[name] is not None
  }
  of_reading, *of_programs = stopwatch.in_turns(
    [reading(nbytes), *served.values()], range(rounds)
  )
  taken = dict(zip(served, of_programs, strict=True))
  return Bandwidth(nbytes, of_reading), [
    Timed(
      name,
      taken.get(name),
      spec.ideal_bytes,
      0.0 if found is None else difference(found, results_of[XLA]),
    )
    for name, found in results_of.items()
  ]


def _programs(spec: Spec) -> Iterator[tuple[str, Callable[..., Any]]]:
  yield XLA, by(spec, XLA)
  if jax.default_backend() != "cpu":
    yield PALLAS, by(spec, PALLAS)
  if spec.library is not None:
    yield LIBRARY, spec.library


def by(
  spec: Spec, implementation: kernels.Implementation
) -> Callable[..., Any]:
  """Returns a spec's operation, computed by one kind of program."""

  def run(*operands: Any) -> Any:
    with kernels.use(implementation):
      return spec.run(*operands)

  return run


def results(
  spec: Spec, run: Callable[..., Any], operands: Sequence[Any]
) -> PyTree[np.ndarray] | None:
  """Runs a program of a spec and returns what is compared.

  None if it declines.
  """
  try:
    program = jax.jit(lambda *given: spec.compared(run(*given)))
    return jax.device_get(program(*operands))
  except NotImplementedError:
    return None


def difference(actual: PyTree[np.ndarray], wanted: PyTree[np.ndarray]) -> float:
  """Computes the difference; NaN if only one side has NaN or inf."""
  largest = np.float64(0)
  for one, other in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
    a, b = (np.asarray(x, np.float64) for x in (one, other))
    if not np.array_equal(a, b, equal_nan=True):
      # Infinite where all that is wanted is 0.
      with np.errstate(divide="ignore"):
        relative = np.max(np.abs(a - b)) / np.max(np.abs(b))
      largest = np.maximum(largest, relative)
  return float(largest)


def timer(run: Callable[..., Any], operands: Sequence[Any]) -> _Seconds:
  """Repeats an operation in one program until launch time is negligible."""
  once = _repeated(run, operands, 1)
  once()
  uses = min(max(1, round(_SECONDS / once())), _MOST)
  if uses == 1:
    return once
  many = _repeated(run, operands, uses)
  many()
  return lambda: many() / uses


def _repeated(
  run: Callable[..., Any], operands: Sequence[Any], uses: int
) -> _Seconds:
  compiled = jax.jit(_program(run, uses)).lower(*operands).compile()
  return lambda: stopwatch.seconds(lambda: compiled(*operands))


def _program(run: Callable[..., Any], uses: int) -> Callable[..., Any]:
  """Builds a program that repeats an operation and returns the last results."""

  def use(_: Int[Array, ""], carried: tuple[Any, Any]) -> tuple[Any, Any]:
    # Otherwise the compiler would hoist the repeated computation.
    given, results = jax.lax.optimization_barrier(carried)
    del results
    return given, run(*given)

  def program(*operands: Any) -> Any:
    results = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *operands)
    )
    return jax.lax.fori_loop(0, uses, use, (operands, results))[1]

  return program
