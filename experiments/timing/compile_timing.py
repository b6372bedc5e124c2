"""Times a first call, which compiles, and a later one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import stopwatch


class Timed(NamedTuple):
  """Two calls of the same program.

  Attributes:
    name: name of the program.
    layers: L.
    first: seconds of the first call, which compiles.
    later: seconds of the second call.
  """

  name: str
  layers: int
  first: float
  later: float

  @property
  def compiling(self) -> float:
    """Extra seconds of the first call."""
    return self.first - self.later


def twice(name: str, layers: int, call: Callable[[], Any]) -> tuple[Any, Timed]:
  """Calls a program of L layers twice; returns its last result, too."""
  _, first = stopwatch.timed(call)
  result, later = stopwatch.timed(call)
  return result, Timed(name, layers, first, later)


HEADING = ("program", "layers", "first call", "later call", "compiling")


def table(timed: Sequence[Timed]) -> Table:
  """Builds the table, with a column that compares depths if there are more."""
  smallest = {one.name: one for one in reversed(timed)}
  lines = []
  for one in timed:
    first = smallest[one.name]
    ratio = "" if one is first else f"{one.compiling / first.compiling:.2f}"
    seconds = (f"{s:.2f}" for s in (one.first, one.later, one.compiling))
    lines.append((one.name, str(one.layers), *seconds, ratio))
  if not any(ratio for *_, ratio in lines):
    return Table("", HEADING, [line[:-1] for line in lines])
  return Table("", (*HEADING, f"× {timed[0].layers} layers"), lines)
