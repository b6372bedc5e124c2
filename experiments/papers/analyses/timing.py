"""Timing helpers."""

import statistics
import time
from collections.abc import Callable

import jax
from jaxtyping import Array, PyTree


def median_seconds(run: Callable[[], PyTree[Array]], rounds: int = 5) -> float:
  """Measures the median wall time of calls, after one that compiles.

  Args:
    run: the function to time, until its results are ready.
    rounds: number of calls.
  """
  jax.block_until_ready(run())
  seconds = []
  for _ in range(rounds):
    began = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds)
