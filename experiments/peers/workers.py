"""Processes that measure, one for each library."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvjax.errors import InputError

_EXPERIMENTS = pathlib.Path(__file__).parents[1]


class Measured(NamedTuple):
  """The answer of a worker.

  Attributes:
    result: what the operation returned, mostly seconds.
    peak: peak of the process's resident memory in bytes, if it is known.
  """

  result: Any
  peak: int | None


class Worker:
  """A process that does what it is asked to, and says how long it took."""

  def __init__(
    self, name: str, command: Sequence[str], folder: pathlib.Path
  ) -> None:
    """Starts the process."""
    self._name = name
    # Threads that wait in a loop would take a core from the other worker. The
    # peer may use OpenBLAS for products, so that our limit is not for it; our
    # worker sets its own.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    environment.pop("OPENBLAS_NUM_THREADS", None)
    self._process = subprocess.Popen(
      command,
      cwd=folder,
      env=environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._requests = self._process.stdin
    self._answers = self._process.stdout

  def ask(self, operation: str, **arguments: Any) -> Measured:
    """Has an operation done; see `serving.serve`.

    Raises:
      InputError: it failed, or the process has ended.
    """
    try:
      request = json.dumps({"do": operation, **arguments})
      print(request, file=self._requests, flush=True)
      line = self._answers.readline()
    except BrokenPipeError:
      line = ""
    if not line:
      raise InputError(
        f"{self._name}'s process ended during {operation}; there may be too "
        "little memory, or its environment is incomplete."
      )
    answer = json.loads(line)
    if "error" in answer:
      raise InputError(f"{self._name} failed: {answer['error'][:500]}")
    return Measured(answer["result"], answer["peak"])

  def stop(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.communicate()


@contextlib.contextmanager
def started(environment: pathlib.Path | None) -> Iterator[list[Worker]]:
  """Starts kvjax's worker and kvpress's, and stops them at the end.

  Args:
    environment: the virtual environment with kvpress; None for kvjax alone.
  """
  ours = (sys.executable, "-m", "kvjax.experiments.peers.kvjax_side")
  workers = [Worker("kvjax", ours, pathlib.Path.cwd())]
  try:
    if environment is not None:
      # Not resolved: links lead out of the environment.
      python = str((environment / "bin" / "python").absolute())
      theirs = (python, "-m", "peers.kvpress_side")
      # From their folder: kvjax cannot be imported there.
      workers.append(Worker("kvpress", theirs, _EXPERIMENTS))
    yield workers
  finally:
    for worker in workers:
      worker.stop()
