"""How long something takes."""

import statistics
import time
from collections.abc import Callable

import jax
from jaxtyping import Array, PyTree


def median_seconds(run: Callable[[], PyTree[Array]], rounds: int = 5) -> float:
  """Median wall time of some calls, after one that compiles.

  Args:
    run: what is timed, till its results are there.
    rounds: how many calls.
  """
  jax.block_until_ready(run())
  seconds = []
  for _ in range(rounds):
    began = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds)
