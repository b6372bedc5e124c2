"""Records the processes that produced the answers of a folder.

An interrupted run resumes in another process, and later processes may add
methods. Each may have its own machine and package versions.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvjax.errors import InputError
from kvjax.experiments.run import environment, multihost, outputs, typed_records
from kvjax.files import read_json_if_present


@dataclasses.dataclass(frozen=True)
class Process:
  """A process.

  Attributes:
    device: the device it ran on.
    versions: versions of Python and packages.
    seconds: time spent per phase.
  """

  device: str
  versions: Mapping[str, str]
  seconds: Mapping[str, float]


class Processes:
  """The processes in `processes.json` of a folder, the current one last.

  The file is updated with every few answers, so it also covers killed runs.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    device: str,
    began: float,
    spent: Callable[[], Mapping[str, float]] = dict,
  ):
    """Reads the earlier processes.

    Args:
      folder: folder of the file, which `note` creates.
      device: the device of this process.
      began: its start, by `time.monotonic`.
      spent: returns its seconds per phase so far.

    Raises:
      InputError: the file has another format.
    """
    self._path = folder / "processes.json"
    self._device, self._began, self._spent = device, began, spent
    self._versions = environment.versions()
    self._noted = False
    self._earlier: list[Process] = []
    content = read_json_if_present(self._path)
    if not content:
      return
    try:
      typed_records.check(content, {"processes": list[dict[str, Any]]})
      for fields in content["processes"]:
        self._earlier.append(typed_records.make(Process, fields))
    except ValueError as error:
      raise InputError(
        f"{self._path} is not what a run writes ({error}); remove it."
      ) from error

  def note(self) -> None:
    """Writes how long this process has taken, for one that resumes the run."""
    self._noted = True
    if multihost.is_first():
      processes = map(dataclasses.asdict, (*self._earlier, self._current()))
      outputs.write_json(
        self._path, {"processes": list(processes)}, outputs.ANSWERS
      )

  def summary(self) -> dict[str, Any]:
    """Writes the time of this process, and merges all that did a part.

    It is written only if this process did a part. Different devices and
    versions are listed, seconds are added up. A process that found nothing left
    to do counts only where no other one is known.
    """
    if self._noted:
      # What comes after the last part counts, too.
      self.note()
    processes = list(self._earlier)
    if self._noted or not processes:
      processes.append(self._current())
    return {
      "device": _join_distinct(process.device for process in processes),
      "versions": {
        name: _join_distinct(
          process.versions.get(name, "none") for process in processes
        )
        for name in _names([process.versions for process in processes])
      },
      "seconds": {
        name: round(
          sum(process.seconds.get(name, 0.0) for process in processes), 1
        )
        for name in _names([process.seconds for process in processes])
      },
    }

  def remove(self) -> None:
    """Removes the file, once the run is done."""
    self._path.unlink(missing_ok=True)

  @property
  def seconds(self) -> dict[str, float]:
    """Seconds of this process per phase, and in total."""
    return {**self._spent(), "total": time.monotonic() - self._began}

  def _current(self) -> Process:
    return Process(self._device, self._versions, self.seconds)


def _join_distinct(values: Iterable[str]) -> str:
  return " and ".join(dict.fromkeys(values))


def _names(mappings: Sequence[Mapping[str, object]]) -> list[str]:
  return list(dict.fromkeys(name for process in mappings for name in process))
