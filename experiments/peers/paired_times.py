"""Times a case in both libraries, in turns."""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from kvjax.experiments.peers.cases import Case
from kvjax.experiments.peers.workers import Worker
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run.environment import device


@dataclasses.dataclass(frozen=True)
class Times:
  """Measurements of one library.

  Attributes:
    first: seconds of the first call, which compiles what there is to compile.
    seconds: of later calls, one per round.
    peak: peak of memory in later calls, in bytes (kvjax's on a GPU is of all
      calls); None where it is unknown.
    device: what computed.
  """

  first: float
  seconds: Sequence[float]
  peak: int | None
  device: str

  @property
  def median(self) -> float:
    """The median of later calls."""
    return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class Compared:
  """Measurements of a case.

  Attributes:
    case: the case.
    ours: kvjax's.
    theirs: kvpress's; None without its environment.
    share: of the device's limits that kvjax reaches; None if the work is
      unknown.
    versions: of all libraries.
  """

  case: Case
  ours: Times
  theirs: Times | None
  share: float | None
  versions: Mapping[str, str]

  def ratios(self) -> list[float]:
    """For each round, kvpress's time over ours."""
    assert self.theirs is not None
    rounds = zip(self.theirs.seconds, self.ours.seconds, strict=True)
    return [theirs / ours for theirs, ours in rounds]


def compare(
  case: Case,
  workers: Sequence[Worker],
  model: pathlib.Path,
  dtype: str,
  rounds: int,
) -> Compared:
  """Times a case in processes that are new, so that memory is the case's own.

  Args:
    case: the case.
    workers: kvjax's, and kvpress's if there is one.
    model: directory of the model.
    dtype: dtype of weights, cache and activations.
    rounds: later calls of each.

  Raises:
    InputError: a library fails.
  """
  versions: dict[str, str] = {}
  devices = []
  for worker in workers:
    versions.update(worker.ask("versions").result)
    devices.append(worker.ask("device").result)
    worker.ask("load", path=str(model), dtype=dtype)
  share, arguments = [1.0] * len(workers), [case.arguments] * len(workers)
  if case.per_row and len(workers) > 1:
    share[1] = float(case.arguments["rows"])
    arguments[1] = {**case.arguments, "rows": 1}

  def call(index: int) -> tuple[float, int | None]:
    answer = workers[index].ask(case.operation, **arguments[index])
    return share[index] * answer.result, answer.peak

  indexes = range(len(workers))
  first = [call(index)[0] for index in indexes]
  calls = [[call(index) for index in indexes] for _ in range(rounds)]
  times = list(map(_times, first, zip(*calls, strict=True), devices))
  # Last, since it takes memory.
  limits = workers[0].ask("limits").result
  return Compared(
    case,
    times[0],
    times[1] if len(times) > 1 else None,
    None if case.work is None else case.work.seconds(limits) / times[0].median,
    versions,
  )


def _times(
  first: float, calls: Sequence[tuple[float, int | None]], device: str
) -> Times:
  peaks = [peak for _, peak in calls if peak is not None]
  seconds = [seconds for seconds, _ in calls]
  return Times(first, seconds, max(peaks) if peaks else None, device)


HEADING = (
  *("kvjax, s", "kvpress, s", "ratio", "range", "kvjax, first call, s"),
  *("kvjax, MiB", "kvpress, MiB", "% of limit"),
)


def devices(compared: Compared) -> str:
  """Names the device, or both if the libraries found different ones."""
  ours, theirs = compared.ours, compared.theirs
  if theirs is None or theirs.device == ours.device:
    return device()
  return f"{device()} (kvpress on {theirs.device})"


def table(name: str, found: Sequence[Compared]) -> Table:
  """Builds the table, without columns of which nothing is known.

  Args:
    name: name of the table, above its labels.
    found: what was measured, line by line.
  """
  lines = [(one.case.label, *_cells(one)) for one in found]
  known = [any(column) for column in zip(*lines, strict=True)]
  header, *lines = (
    tuple(itertools.compress(line, known))
    for line in ((name, *HEADING), *lines)
  )
  return Table("", header, lines)


def _cells(compared: Compared) -> tuple[str, ...]:
  ours, theirs = compared.ours, compared.theirs
  ratio, spread = "", ""
  if theirs is not None:
    ratios = compared.ratios()
    ratio = _ratio(statistics.median(ratios))
    if len(ratios) > 1:
      spread = f"{_ratio(min(ratios))}–{_ratio(max(ratios))}"
  return (
    _seconds(ours.median),
    "" if theirs is None else _seconds(theirs.median),
    ratio,
    spread,
    _seconds(ours.first, 1),
    _mebibytes(ours.peak),
    "" if theirs is None else _mebibytes(theirs.peak),
    "" if compared.share is None else _percentage(compared.share),
  )


def _percentage(share: float) -> str:
  return f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}"


def _seconds(value: float, most: int = 3) -> str:
  if value < 0.1:  # as of a layer on a GPU
    return f"{value:.3g}"
  digits = most if value < 10 else 1 if value < 100 else 0
  return f"{value:,.{digits}f}"


def _ratio(value: float) -> str:
  return f"{value:.{2 if value < 10 else 1}f}"


def _mebibytes(count: int | None) -> str:
  return "" if count is None else f"{count / 2**20:,.0f}"
