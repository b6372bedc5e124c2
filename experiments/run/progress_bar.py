"""Progress bars on stderr."""

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

from kvjax.experiments.run import hosts

# Called with what is done or in progress, and the number of new steps.
Advance = Callable[[str, float], None]


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
  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description:15}", markup=False),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TextColumn("left"),
    rich.progress.TimeRemainingColumn(),
    console=console,
    transient=transient,
    disable=not hosts.is_first() or (transient and not console.is_interactive),
  ) as progress:
    bar = progress.add_task(doing, total=total, completed=done)

    def advance(task: str, count: float) -> None:
      progress.update(bar, description=task, advance=count)

    yield advance


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
