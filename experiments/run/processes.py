"""Records the processes that produced the answers of a folder.

An interrupted run resumes in another process, and later processes may add
methods. Each may have its own machine and package versions.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvjax.errors import InputError
from kvjax.experiments.run import outputs, typed_records
from kvjax.models.json_files import read_json_if_present


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

  Attributes:
    path: the file.
  """

  def __init__(self, folder: pathlib.Path):
    """Reads the earlier processes.

    Raises:
      InputError: the file has another format.
    """
    self.path = folder / "processes.json"
    self._earlier: list[Process] = []
    content = read_json_if_present(self.path)
    if not content:
      return
    try:
      typed_records.check(content, {"processes": list[dict[str, Any]]})
      for fields in content["processes"]:
        self._earlier.append(typed_records.make(Process, fields))
    except ValueError as error:
      raise InputError(
        f"{self.path} is not what a run writes ({error}); remove it."
      ) from error

  def note(self, current: Process) -> None:
    """Writes or updates the record of the current process."""
    processes = [
      dataclasses.asdict(process) for process in (*self._earlier, current)
    ]
    outputs.write_json(self.path, {"processes": processes}, outputs.ANSWERS)

  def summary(self, current: Process, answered: bool) -> dict[str, Any]:
    """Merges the records of all processes that generated answers.

    Different values are listed, times are added up.

    Args:
      current: record of the current process.
      answered: whether the current process generated answers.
    """
    processes = [
      *self._earlier,
      *([current] if answered or not self._earlier else []),
    ]
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


def _join_distinct(values: Iterable[str]) -> str:
  return " and ".join(dict.fromkeys(values))


def _names(mappings: Sequence[Mapping[str, object]]) -> list[str]:
  return list(dict.fromkeys(name for process in mappings for name in process))
