"""How programs end early: exit codes, and what stands for them."""

import os
import signal
import sys
from typing import NoReturn

import jax

WRONG_INPUT = 2
INTERRUPTED = 130
# Of programs that the machine's owner ends; launchers start them again.
PREEMPTED = 128 + signal.SIGTERM


class StoppedError(Exception):
  """A run that ends early, and that the same command resumes."""


class RefusedError(Exception):
  """A user's mistake that another host has found, or that all have."""


class Preempted(KeyboardInterrupt):
  """SIGTERM, which is handled as an interrupt is."""


def leave(code: int) -> NoReturn:
  """Exits before the work is done."""
  early = code in (INTERRUPTED, PREEMPTED)
  if early or jax.distributed.is_initialized():
    # Python's exit takes JAX seconds, and would wait for the other hosts, which
    # wait for this one.
    _end(code)
  sys.exit(code)


def _end(code: int) -> NoReturn:
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
