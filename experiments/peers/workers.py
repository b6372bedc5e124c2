"""Processes that measure, one for each library."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.errors import InputError

_EXPERIMENTS = pathlib.Path(__file__).parents[1]
# Of a checkout, whose folders are links in kvjax/.
_ROOT = _EXPERIMENTS.resolve().parent
# Characters of an error that ended a process.
_LAST = 200


class Measured(NamedTuple):
  """The answer of a worker.

  Attributes:
    result: what the operation returned, mostly seconds.
    peak: peak of memory in bytes, if it is known; see `serving.Memory`.
  """

  result: Any
  peak: int | None


class Worker:
  """A process that does what it is asked to, and says how long it took."""

  def __init__(
    self,
    name: str,
    command: Sequence[str],
    folder: pathlib.Path,
    variables: Mapping[str, str] | None = None,
  ) -> None:
    """Starts the process.

    Args:
      name: the library's, for messages.
      command: the program and its arguments.
      folder: where the process starts.
      variables: of its environment, besides those of this process.
    """
    self._name = name
    # Threads that wait in a loop would take a core from the other worker.
    passive = {"OMP_WAIT_POLICY": "passive"}
    environment = {**os.environ, **passive, **(variables or {})}
    # `stop` closes it.
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115
    self._process = subprocess.Popen(
      command,
      cwd=folder,
      env=environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
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
        f"little memory, or its environment is incomplete.{self._last_words()}"
      )
    answer = json.loads(line)
    if "error" in answer:
      raise InputError(f"{self._name} failed: {answer['error'][:500]}")
    return Measured(answer["result"], answer["peak"])

  def stop(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.communicate()
    self._errors.close()

  def _last_words(self) -> str:
    """Says what the process wrote last on stderr, if anything."""
    self._process.wait()
    self._errors.seek(0)
    said = " ".join(self._errors.read().decode(errors="replace").split())
    return f" It said last: {said[-_LAST:]}" if said else ""


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
      variables = {"PYTHONPATH": _path_of_peers()}
      workers.append(Worker("kvpress", theirs, _EXPERIMENTS, variables))
    yield workers
  finally:
    for worker in workers:
      worker.stop()


def _path_of_peers() -> str:
  """PYTHONPATH without this checkout.

  Its folders have names of other packages, such as kernels, which transformers
  would take for Hugging Face's.
  """
  given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
  folders = [pathlib.Path(path).resolve() for path in given if path]
  return os.pathsep.join(str(path) for path in folders if path != _ROOT)
