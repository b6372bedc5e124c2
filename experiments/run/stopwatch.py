"""Times calls, once, repeatedly or in turns."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax


def timed[Result](call: Callable[[], Result]) -> tuple[Result, float]:
  """Returns the call's result and the seconds until it was ready."""
  began = time.perf_counter()
  result: Result = jax.block_until_ready(call())
  return result, time.perf_counter() - began


def seconds(call: Callable[[], Any]) -> float:
  """Measures the seconds until the results of a call are ready."""
  return timed(call)[1]


def repeated(call: Callable[[], Any], rounds: int) -> list[float]:
  """Measures the seconds of calls, after one that compiles."""
  return [seconds(call) for _ in range(1 + rounds)][1:]


def in_turns(
  timers: Sequence[Callable[[], float]], rounds: Iterable[object]
) -> list[list[float]]:
  """Reads each timer once a round, so that all see the same interference.

  Args:
    timers: functions that measure seconds.
    rounds: one item a round, of any kind.

  Returns:
    The seconds of each timer, round by round.
  """
  taken = [[timer() for timer in timers] for _ in rounds]
  return [list(own) for own in zip(*taken, strict=True)]
