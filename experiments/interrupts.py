"""SIGINT and SIGTERM as interrupts of a program, which acts on them soon."""

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator

from kvjax.experiments import exits
from kvjax.experiments.run import sending

_AGAIN_SECONDS = 0.02
_GRACE_SECONDS = 1.0
# The same for work that is saved first; launchers give notice of 30 or more.
SAVING_SECONDS = 25.0
# The same for a program that this one runs, and waits for.
_CHILD_SECONDS = SAVING_SECONDS + 3 * _GRACE_SECONDS

_Handler = Callable[[int, types.FrameType | None], None]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
  """Lets SIGTERM raise an interrupt, as SIGINT does, and neither get lost.

  Schedulers of batch systems send SIGTERM before they kill. From a program that
  runs this one, it may follow the terminal's SIGINT, or come twice; then it
  does not interrupt the last steps of this one. Another SIGINT does.

  Python drops what is raised while it collects garbage, where JAX has a
  callback, so that an interrupt there would only be reported. It is repeated a
  moment later.
  """
  # Only the main thread can say what signals do.
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  report = sys.unraisablehook
  ending = False

  def interrupt(number: int, frame: types.FrameType | None) -> None:
    nonlocal ending
    ending = True
    raise KeyboardInterrupt

  def end(number: int, frame: types.FrameType | None) -> None:
    nonlocal ending
    if not ending:
      ending = True
      raise exits.Preempted

  def repeat(dropped: "sys.UnraisableHookArgs") -> None:
    if issubclass(dropped.exc_type, KeyboardInterrupt):
      signal.signal(signal.SIGALRM, _raising(dropped.exc_type))
      signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
      report(dropped)

  handlers: dict[int, _Handler] = {signal.SIGTERM: end, signal.SIGALRM: end}
  # Shells let programs in the background ignore it.
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    handlers[signal.SIGINT] = interrupt
  before = [(n, signal.signal(n, handler)) for n, handler in handlers.items()]
  sys.unraisablehook = repeat
  try:
    with _at_once():
      yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.unraisablehook = report
    for number, earlier in before:
      signal.signal(number, earlier)


def _raising(interrupt: type[KeyboardInterrupt]) -> _Handler:
  """Returns a handler of signals that raises an interrupt."""

  def handle(number: int, frame: types.FrameType | None) -> None:
    raise interrupt

  return handle


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
  """Ends the process if a signal is not acted on within a second.

  SIGTERM waits longer for programs that save their work first, and both signals
  for another program that this one runs. What goes to an address is sent.

  Python's handlers wait for the main thread, which may be compiling. The number
  of a signal is written to a pipe in any case, where another thread reads it.
  All files are written so that a process may end at any time.
  """
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  acted = threading.Event()

  def watch() -> None:
    with os.fdopen(reader, "rb", buffering=0) as pipe:
      while number := pipe.read(1):
        if number[0] in (signal.SIGINT, signal.SIGTERM):
          break
      saves = number == bytes([signal.SIGTERM]) and exits.POSTPONED.is_set()
      seconds = SAVING_SECONDS if saves else _GRACE_SECONDS
      if exits.WAITING.is_set():
        seconds = _CHILD_SECONDS
      if number and not acted.wait(seconds):
        # A progress bar may have hidden the cursor, and is in mid-line.
        shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""
        os.write(sys.stderr.fileno(), f"{shown}Stopped.\n".encode())
        sending.send_at_once(SAVING_SECONDS)
        preempted = number[0] == signal.SIGTERM
        os._exit(exits.PREEMPTED if preempted else exits.INTERRUPTED)

  before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  watcher = threading.Thread(target=watch, daemon=True)
  watcher.start()
  try:
    yield
  finally:
    acted.set()
    signal.set_wakeup_fd(before)
    os.close(writer)
    watcher.join()
