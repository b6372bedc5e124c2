"""Adds up the time of a run over the processes that it was interrupted in."""

import pathlib
import time
from typing import Any

from kvjax.experiments.run import environment, multihost
from kvjax.experiments.run.processes import Process, Processes


class Elapsed:
  """The time of this process and, from `processes.json`, of earlier ones."""

  def __init__(self, folder: pathlib.Path, device: str, began: float):
    """Reads the earlier processes.

    Args:
      folder: folder of the file, which `note` creates.
      device: the device of this process.
      began: its start, by `time.monotonic`.

    Raises:
      InputError: the file has another format.
    """
    self._processes = Processes(folder)
    self._device, self._began = device, began
    self._noted = False

  def note(self) -> None:
    """Writes how long this process has taken, for one that resumes the run."""
    self._noted = True
    if multihost.is_first():
      self._processes.note(self._current())

  def summary(self) -> dict[str, Any]:
    """Sums up all processes that did a part, and notes the time of this one.

    One that found nothing left to do counts only where no other one is known.

    Returns:
      Their devices, versions and seconds.
    """
    current = self._current()
    if self._noted and multihost.is_first():
      # What comes after the last part counts, too.
      self._processes.note(current)
    found = self._processes.summary(current, self._noted)
    return found | {"seconds": found["seconds"]["total"]}

  def remove(self) -> None:
    """Removes the file, of a run that is done."""
    self._processes.path.unlink(missing_ok=True)

  def _current(self) -> Process:
    seconds = {"total": time.monotonic() - self._began}
    return Process(self._device, environment.versions(), seconds)
