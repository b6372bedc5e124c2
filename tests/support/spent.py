"""Time of processors that the programs of a test take."""

import contextlib
import resource


@contextlib.contextmanager
def at_most(seconds):
  """Fails if the programs that are run within take more seconds of all cores.

  Those that they run count as well. Other programs on the machine do not
  matter, as they would for the time that passes.
  """
  before = _seconds()
  yield
  assert _seconds() - before < seconds


def _seconds():
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime
