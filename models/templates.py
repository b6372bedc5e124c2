"""Chat templates: programs of strangers, within limits of time and memory.

Jinja's sandbox keeps a template from the files and objects of this process, but
not from looping for ever, or from making a text of many gigabytes: loops,
operators, filters, methods of texts and constants that are folded while it
compiles can all do so in one call, which nothing within Python interrupts. A
list of the dangerous ones would never be complete. Therefore templates are
compiled and rendered by another process, `template_worker`, which the system
limits in memory and ends when its time is up. One process serves all templates,
as starting it takes longer than rendering.
"""

import atexit
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

# Of computing; a chat takes a thousandth of this.
SECONDS = 2.0
# A busy machine may take so many times longer. Without a timer of the system,
# the limit is by the clock.
_TIMER = hasattr(signal, "setitimer")
_PATIENCE = 5.0 if _TIMER else 1.0
_START_SECONDS = 60.0
_WORKER = pathlib.Path(__file__).with_name("template_worker.py")


class ChatTemplateError(Exception):
  """What is wrong with a template, in words without a full stop."""


class ChatTemplate:
  """A chat template.

  Attributes:
    source: its text, in Jinja.
  """

  def __init__(self, source: str) -> None:
    """Checks that it compiles.

    Raises:
      ChatTemplateError: it does not, or not within the limits.
    """
    self.source = source
    _worker().answer({"source": source, "variables": None})

  def render(self, variables: Mapping[str, Any]) -> str:
    """Renders the template.

    Args:
      variables: what JSON can represent, by name.

    Raises:
      ChatTemplateError: the template raises an error, or exceeds a limit.
    """
    return _worker().answer({"source": self.source, "variables": variables})


class _Worker:
  """The other process, started on demand and again after it was killed."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None

  def answer(self, request: Mapping[str, Any]) -> str:
    """Sends a request; returns the text of the answer.

    Raises:
      ChatTemplateError: the answer is an error, or there is none in time.
    """
    with self._lock:
      if self._process is None or self._process.poll() is not None:
        self._start()
      content = self._exchange(request, SECONDS)
    reply = json.loads(content.decode("utf-8", "surrogatepass"))
    if "error" in reply:
      raise ChatTemplateError(reply["error"])
    text: str = reply["text"]
    return text

  def stop(self) -> None:
    """Ends the process."""
    process, self._process = self._process, None
    if process is not None:
      process.kill()
      # Closes the pipes and waits.
      process.communicate()

  def _start(self) -> None:
    self.stop()
    # Only what Jinja needs: without the site's packages it starts faster.
    found = map(importlib.util.find_spec, ("jinja2", "markupsafe"))
    folders = {
      str(pathlib.Path(spec.origin).parents[1])
      for spec in found
      if spec is not None and spec.origin is not None
    }
    try:
      self._process = subprocess.Popen(
        # -P: modules next to the worker must not hide others of their names.
        [sys.executable, "-S", "-P", "-W", "ignore", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        # An interrupt at the keyboard is for this process only.
        start_new_session=True,
      )
    except OSError as error:
      raise ChatTemplateError(
        f"the process that renders it cannot be started ({error.strerror})"
      ) from error
    # It takes a moment to start, which is not the template's.
    self._exchange({"source": "", "variables": None}, _START_SECONDS)

  def _exchange(self, request: Mapping[str, Any], seconds: float) -> bytes:
    """Sends a request and returns the line that answers it."""
    line = (
      json.dumps({**request, "seconds": seconds}, ensure_ascii=False) + "\n"
    )
    process = self._process
    assert process is not None
    assert process.stdin is not None
    assert process.stdout is not None
    late = threading.Event()

    def kill() -> None:
      late.set()
      process.kill()

    timer = threading.Timer(seconds * _PATIENCE, kill)
    timer.start()
    try:
      process.stdin.write(line.encode("utf-8", "surrogatepass"))
      process.stdin.flush()
      content = process.stdout.readline()
    except OSError:  # It was killed while this side wrote.
      content = b""
    except BaseException:
      # Interrupted: the answer to this must not be taken for the next one.
      kill()
      raise
    finally:
      timer.cancel()
      if late.is_set():
        # Before that, `poll` may still be None, and the next request would go
        # to the killed process.
        process.wait()
    if content.endswith(b"\n"):
      return content
    code = process.wait()
    if late.is_set() or (_TIMER and code == -signal.SIGPROF):
      raise ChatTemplateError(f"it takes more than {seconds:g} seconds")
    raise ChatTemplateError("it crashes the process that renders it")


# By process, as a fork must not share the pipes.
_workers: dict[int, _Worker] = {}


def _worker() -> _Worker:
  return _workers.setdefault(os.getpid(), _Worker())


@atexit.register
def _stop() -> None:
  if os.getpid() in _workers:
    _workers[os.getpid()].stop()
