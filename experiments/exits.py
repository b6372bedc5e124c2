"""How programs end early: exit codes, and what stands for them."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

import jax

WRONG_INPUT = 2
INTERRUPTED = 130
# Of programs that the machine's owner ends; launchers start them again.
PREEMPTED = 128 + signal.SIGTERM
# Of programs whose output nobody reads any more; shells show it as SIGPIPE's.
UNREAD = 128 + signal.SIGPIPE
# Set while a program has work to save, and does so before SIGTERM ends it.
POSTPONED = threading.Event()
# Set while a program runs another one, which ends first.
WAITING = threading.Event()


class StoppedError(Exception):
  """A run that ends early, and that the same command resumes."""


class RefusedError(Exception):
  """A user's mistake that another host has found, or that all have."""


class Preempted(KeyboardInterrupt):
  """SIGTERM, which is handled as an interrupt is."""


@contextlib.contextmanager
def quiet_when_unread() -> Iterator[None]:
  """Ends the program without a word once the reader of its output is gone.

  Python ignores SIGPIPE, which ends other programs, as in `kvjax | head -1`.
  """
  try:
    try:
      yield
    finally:
      sys.stdout.flush()
  except BrokenPipeError:
    # Python writes the rest of its buffers at exit.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
      os.dup2(nowhere, stream.fileno())
    leave(UNREAD)


def leave(code: int) -> NoReturn:
  """Exits before the work is done."""
  early = code in (INTERRUPTED, PREEMPTED)
  if early or jax.distributed.is_initialized():
    # Python's exit takes JAX seconds, and would wait for the other hosts, which
    # wait for this one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)
