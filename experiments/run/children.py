"""Runs other programs as parts of one, which end as it ends."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from kvjax.experiments import exits


class Ended(NamedTuple):
  """How a program has ended.

  Attributes:
    code: its exit code.
    printed: what it wrote to stdout, if that was to be kept; else empty.
  """

  code: int
  printed: str


def run(module: str, arguments: Sequence[str], keep: bool = False) -> Ended:
  """Runs a program on the same terminal.

  Signals that end this program end the other one likewise, which
  `subprocess.run` would kill, and the other way round.

  Args:
    module: name of its module.
    arguments: its arguments.
    keep: returns what it prints instead of showing it.

  Raises:
    KeyboardInterrupt: this program or the other one was interrupted.
    exits.Preempted: either got SIGTERM.
  """
  command = [sys.executable, "-m", module, *arguments]
  stdout = subprocess.PIPE if keep else None
  with subprocess.Popen(command, stdout=stdout, text=True) as process:
    try:
      printed, _ = process.communicate()
    except KeyboardInterrupt:
      process.terminate()
      # It may still print more than a pipe holds.
      process.communicate()
      raise
  code = process.returncode
  if code in (-signal.SIGINT, exits.INTERRUPTED):
    raise KeyboardInterrupt
  if code in (-signal.SIGTERM, exits.PREEMPTED):
    raise exits.Preempted
  return Ended(code, printed or "")
