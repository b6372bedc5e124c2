"""What the processes behind a folder's answers say of themselves.

A run that was stopped goes on in another process, other methods are added in a
third, and each may have another machine and other versions.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvjax.errors import InputError
from kvjax.experiments import reports
from kvjax.models.json_files import read_json_if_present


@dataclasses.dataclass(frozen=True)
class Process:
  """One of them.

  Attributes:
    device: what it ran on.
    versions: of Python and packages.
    seconds: that its parts have taken, by name.
  """

  device: str
  versions: Mapping[str, str]
  seconds: Mapping[str, float]


class Processes:
  """Those in `processes.json` of a folder, the one that runs now the last.

  It is written with every few answers, so that a killed one is known too.
  """

  def __init__(self, folder: pathlib.Path):
    """Reads what others have written.

    Raises:
      InputError: the file holds something else.
    """
    self._path = folder / "processes.json"
    content = read_json_if_present(self._path)
    try:
      self._earlier = [Process(**fields) for fields in content["processes"]]
    except (KeyError, TypeError) as error:
      if content:
        raise InputError(
          f"{self._path} is not what a run writes; remove it."
        ) from error
      self._earlier = []

  def note(self, own: Process) -> None:
    """Writes down what this process says so far, in place of what it said."""
    every = [dataclasses.asdict(each) for each in (*self._earlier, own)]
    reports.write_json(self._path, {"processes": every}, reports.ANSWERS)

  def summary(self, own: Process, answered: bool) -> dict[str, Any]:
    """Device, versions and seconds of all that have answered something.

    What differs is listed, seconds are added up.

    Args:
      own: what this process says.
      answered: whether it has answered anything.
    """
    every = [*self._earlier, *([own] if answered or not self._earlier else [])]
    return {
      "device": _listed(each.device for each in every),
      "versions": {
        name: _listed(each.versions.get(name, "none") for each in every)
        for name in _names([each.versions for each in every])
      },
      "seconds": {
        name: round(sum(each.seconds.get(name, 0.0) for each in every), 1)
        for name in _names([each.seconds for each in every])
      },
    }


def _listed(values: Iterable[str]) -> str:
  return " and ".join(dict.fromkeys(values))


def _names(several: Sequence[Mapping[str, object]]) -> list[str]:
  return list(dict.fromkeys(name for each in several for name in each))
