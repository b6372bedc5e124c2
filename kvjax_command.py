"""The command `kvjax`, which Ctrl-C ends from its first moment.

Importing kvjax takes a second, in which Python would end an interrupt with a
traceback, or lose it. Nothing is written before the imports are done.
"""

import os
import signal
import types


def main() -> None:
  """Starts `kvjax.experiments.main`."""
  # Shells let programs in the background ignore it.
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop)
  from kvjax.experiments.main import main as start

  start()


def _stop(number: int, frame: types.FrameType | None) -> None:
  os.write(2, b"Stopped.\n")
  os._exit(128 + number)
