"""Progress bars on stderr."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence

import rich.console
import rich.progress

from kvjax.experiments.run import multihost

# Called with what is done or in progress, and the number of new steps.
Advance = Callable[[str, float], None]


def _stderr() -> rich.console.Console:
  """Makes a console; without ipywidgets, Jupyter shows bars when they end."""
  console = rich.console.Console(stderr=True)
  if not console.is_jupyter or importlib.util.find_spec("ipywidgets"):
    return console
  return rich.console.Console(
    stderr=True, force_jupyter=False, force_terminal=False
  )


# The same for all bars: rich then shows one within another below it.
_CONSOLE = _stderr()
# A line of 80 columns also holds counts and times.
_BAR_WIDTH = 28


@contextlib.contextmanager
def progress_bar(
  total: float | None,
  doing: str = "compiling",
  transient: bool = False,
  done: int = 0,
) -> Iterator[Advance]:
  """Shows a progress bar; yields a function that advances it.

  Args:
    total: number of steps, if known.
    doing: description before the first step.
    transient: remove the bar in the end, and show it on terminals only.
    done: number of steps that are done before.
  """
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description:15}", markup=False),
    rich.progress.BarColumn(_BAR_WIDTH),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TextColumn("in"),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TextColumn("and"),
    rich.progress.TimeRemainingColumn(),
    rich.progress.TextColumn("left"),
    console=_CONSOLE,
    transient=transient,
    disable=not multihost.is_first()
    or (transient and not _CONSOLE.is_interactive),
  ) as progress:
    bar = progress.add_task(doing, total=total, completed=done)

    def advance(task: str, count: float) -> None:
      progress.update(bar, description=task, advance=count)

    yield advance


def track[Step](
  steps: Sequence[Step], doing: str = "measuring"
) -> Iterator[Step]:
  """Yields steps under a progress bar, on terminals only.

  Examples:
    >>> list(track(["a", "b"]))
    ['a', 'b']
  """
  with progress_bar(len(steps), doing, transient=True) as advance:
    for step in steps:
      yield step
      advance(doing, 1)


@contextlib.contextmanager
def step_bar(name: str, left: range) -> Iterator[Callable[[int, float], None]]:
  """Shows the progress of a training; yields a function of step and loss.

  Args:
    name: description of the bar.
    left: the remaining steps; its stop is the total.
  """
  shown = left.start
  with progress_bar(left.stop, name, transient=True, done=shown) as advance:

    def show(step: int, loss: float) -> None:
      nonlocal shown
      advance(f"{name}, loss {loss:.3f}", step - shown)
      shown = step

    yield show
