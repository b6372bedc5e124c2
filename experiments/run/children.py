"""Runs other programs as parts of one, which end as it ends."""

import signal
import subprocess
import sys
from collections.abc import Sequence

from kvjax.experiments import exits


def run_or_exit(module: str, arguments: Sequence[str]) -> None:
  """Runs a program on the same terminal; see `run`.

  Raises:
    SystemExit: it failed, with its own message; a signal that ended it counts
      as shells count it, 128 and its number.
  """
  code, _ = run(module, arguments)
  if code:
    raise SystemExit(code if code > 0 else 128 - code)


def run(
  module: str, arguments: Sequence[str], keep: bool = False
) -> tuple[int, str]:
  """Runs a program; returns its exit code and what was kept of its stdout.

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
      exits.WAITING.set()
      printed, _ = process.communicate()
    except KeyboardInterrupt:
      process.terminate()
      # It may still print more than a pipe holds.
      process.communicate()
      raise
    finally:
      exits.WAITING.clear()
  code = process.returncode
  if code in (-signal.SIGINT, exits.INTERRUPTED):
    raise KeyboardInterrupt
  if code in (-signal.SIGTERM, exits.PREEMPTED):
    raise exits.Preempted
  return code, printed or ""
