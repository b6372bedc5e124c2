"""The progress bar of a training run."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import numpy as np
from rich import progress


@contextlib.contextmanager
def step_bar(name: str, left: range) -> Iterator[Callable[[int, float], None]]:
  """Shows a progress bar; yields a function of step and loss that updates it.

  Args:
    name: description of the bar.
    left: the remaining steps; its stop is the total.
  """
  with progress.Progress(
    progress.TextColumn(name),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeRemainingColumn(),
    progress.TextColumn("loss {task.fields[loss]:.3f}"),
    disable=not sys.stdout.isatty(),
  ) as bar:
    task = bar.add_task(
      name, total=left.stop, completed=left.start, loss=np.nan
    )

    def show(step: int, loss: float) -> None:
      bar.update(task, completed=step, loss=loss)

    yield show
