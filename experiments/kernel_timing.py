"""What operations take on the device at hand, beside its copies."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from kvjax import kernels
from kvjax.kernels.specs import Spec

XLA: kernels.Implementation = "xla"
PALLAS: kernels.Implementation = "pallas"
LIBRARY = "library"

# Bytes of the array that is copied: more than any cache of a chip holds.
COPIED = 2**29

# A round of a program; beside it, what starts one is small.
_SECONDS = 0.1
_MOST = 10_000

_Seconds = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Timed:
  """A program of a spec.

  Attributes:
    program: XLA, PALLAS or LIBRARY.
    seconds: of one use in each round; None where the kernel declines.
    ideal_bytes: that must move.
    difference: the largest one from what XLA's program computes, over the
      largest of its numbers; 0 where all are equal.
  """

  program: str
  seconds: Sequence[float] | None
  ideal_bytes: int
  difference: float

  @property
  def bytes_per_second(self) -> float | None:
    """Of the bytes that must move, by the median round."""
    if self.seconds is None:
      return None
    return self.ideal_bytes / statistics.median(self.seconds)


class Copies(NamedTuple):
  """Copies of one array, timed in turns with the programs.

  Attributes:
    nbytes: read and written.
    seconds: of one copy in each round.
  """

  nbytes: int
  seconds: Sequence[float]

  @property
  def bytes_per_second(self) -> float:
    """By the median round."""
    return self.nbytes / statistics.median(self.seconds)


def copies(nbytes: int) -> Callable[[], float]:
  """Times a copy of an array whenever it is called, in seconds."""
  array = jnp.zeros(nbytes // 4, jnp.float32)
  return _timer(lambda x: x + 1, (array,))


def measure(
  spec: Spec, copied: int, rounds: int, seed: int
) -> tuple[Copies, list[Timed]]:
  """Times every program of a spec and copies, by turns.

  Args:
    spec: the operation and its shapes.
    copied: bytes of the array that is copied.
    rounds: how often each is timed.
    seed: of the operands.
  """
  operands = jax.jit(spec.arrays)(jax.random.key(seed))
  found = {name: _results(run, operands) for name, run in _programs(spec)}
  served = {
    name: _timer(run, operands)
    for name, run in _programs(spec)
    if found[name] is not None
  }
  timers = [copies(copied), *served.values()]
  seconds = [[timer() for timer in timers] for _ in range(rounds)]
  of_copies, *others = zip(*seconds, strict=True)
  taken = dict(zip(served, others, strict=True))
  return Copies(2 * copied, of_copies), [
    Timed(
      name,
      taken.get(name),
      spec.ideal_bytes,
      0.0 if results is None else _difference(results, found[XLA]),
    )
    for name, results in found.items()
  ]


def _programs(spec: Spec) -> Iterator[tuple[str, Callable[..., Any]]]:
  yield XLA, _by(spec, XLA)
  if jax.default_backend() != "cpu":
    yield PALLAS, _by(spec, PALLAS)
  if spec.library is not None:
    yield LIBRARY, spec.library


def _by(
  spec: Spec, implementation: kernels.Implementation
) -> Callable[..., Any]:
  def run(*operands: Any) -> Any:
    with kernels.use(implementation):
      return spec.run(*operands)

  return run


def _results(
  run: Callable[..., Any], operands: Sequence[Any]
) -> PyTree[np.ndarray] | None:
  """What a program computes; None where it declines."""
  try:
    return jax.device_get(jax.jit(run)(*operands))
  except NotImplementedError:
    return None


def _difference(found: PyTree[np.ndarray], wanted: PyTree[np.ndarray]) -> float:
  """NaN where one has it or inf and the other something else."""
  largest = np.float64(0)
  for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    a, b = (np.asarray(x, np.float64) for x in (one, other))
    if not np.array_equal(a, b, equal_nan=True):
      largest = np.maximum(largest, np.max(np.abs(a - b)) / np.max(np.abs(b)))
  return float(largest)


def _timer(run: Callable[..., Any], operands: Sequence[Any]) -> _Seconds:
  """Times so many uses in one program that starting it does not count."""
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

  def seconds() -> float:
    began = time.perf_counter()
    jax.block_until_ready(compiled(*operands))
    return time.perf_counter() - began

  return seconds


def _program(run: Callable[..., Any], uses: int) -> Callable[..., Any]:
  """Uses one after another, of which the last one's results are answered."""

  def use(_: Int[Array, ""], carried: tuple[Any, Any]) -> tuple[Any, Any]:
    # Else the compiler would see that every turn computes the same.
    given, results = jax.lax.optimization_barrier(carried)
    del results
    return given, run(*given)

  def program(*operands: Any) -> Any:
    results = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *operands)
    )
    return jax.lax.fori_loop(0, uses, use, (operands, results))[1]

  return program
