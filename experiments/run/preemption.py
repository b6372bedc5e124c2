"""SIGTERM during work that would be lost: it is saved first."""

import json
import signal
import time
import types
from typing import Self

from kvjax.experiments import exits
from kvjax.experiments.run import multihost

# Seconds of steps between questions to the other hosts; owners of machines give
# notice of 30 seconds or more.
_BETWEEN = 5.0


class Preemption:
  """Notices SIGTERM on any host, and tells all of them after the same step.

  It is a context. Within it, SIGTERM waits while steps are unsaved. At other
  times, it ends a program on one host at once. Of many hosts none leaves alone,
  as JAX aborts those who wait for it: from the first step on, all leave
  together.
  """

  def __init__(self) -> None:
    self._came = False
    self._steps = 0
    # Steps from one question to the next; the first one is asked at once, as it
    # tells how long steps take.
    self._wait = 1
    self._asked = time.monotonic()

  def __enter__(self) -> Self:
    self._before = signal.signal(signal.SIGTERM, self._note)
    return self

  def __exit__(self, *raised: object) -> None:
    exits.POSTPONED.clear()
    signal.signal(signal.SIGTERM, self._before)

  def reached(self) -> bool:
    """Whether to save and stop here; all hosts must call it after each step."""
    exits.POSTPONED.set()
    if multihost.count() == 1:
      return self._came
    self._steps += 1
    if self._steps < self._wait:
      return False
    pace = (time.monotonic() - self._asked) / self._steps
    stops, seconds = self._ask(pace)
    self._wait = max(1, int(_BETWEEN / seconds))
    self._steps = 0
    self._asked = time.monotonic()
    return stops

  def noticed(self) -> bool:
    """Whether to stop here, with nothing to save; all hosts must call it."""
    if multihost.count() == 1:
      return self._came
    exits.POSTPONED.set()
    return self._ask(0.0)[0]

  def saved(self) -> None:
    """Lets SIGTERM end a program on one host: there is nothing to lose.

    Raises:
      exits.Preempted: it has come.
    """
    if multihost.count() > 1:
      return
    exits.POSTPONED.clear()
    if self._came:
      raise exits.Preempted

  def _ask(self, pace: float) -> tuple[bool, float]:
    """Returns whether a host got SIGTERM, and the longest seconds of a step."""
    payload = json.dumps((self._came, pace)).encode()
    came, paces = zip(*map(json.loads, multihost.gather(payload)), strict=True)
    return any(came), max(paces)

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    if not exits.POSTPONED.is_set():
      raise exits.Preempted
    self._came = True
