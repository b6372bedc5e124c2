"""Progress bars on stderr."""

import contextlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax.monitoring
import rich.console
import rich.progress
import rich.text

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
_COMPILING = "compiling"
# JAX's name of what happens when a program is compiled, or found in a cache.
_COMPILED = "/jax/core/compile/backend_compile_duration"
# Seconds between lines where no bar is drawn.
_EVERY = 60.0
# Called with each program that is compiled.
_on_program: list[Callable[[], None]] = []


def _note_program(
  event: str, duration_secs: float, **kwargs: str | int
) -> None:
  del duration_secs, kwargs
  if event == _COMPILED:
    for show in tuple(_on_program):
      show()


jax.monitoring.register_event_duration_secs_listener(_note_program)


@contextlib.contextmanager
def progress_bar(
  total: float | None,
  doing: str = _COMPILING,
  transient: bool = False,
  done: int = 0,
) -> Iterator[Advance]:
  """Shows a progress bar; yields a function that advances it.

  Until the first step, it counts the programs that are compiled. Where output
  is no terminal, it prints a line at the end of a step, at most one a minute.

  Args:
    total: number of steps, if known.
    doing: description before the first step.
    transient: remove the bar in the end, and show it on terminals only.
    done: number of steps that are done before.
  """
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description:15}", markup=False),
    rich.progress.BarColumn(_BAR_WIDTH),
    _Done(),
    rich.progress.TextColumn("in"),
    rich.progress.TimeElapsedColumn(),
    _Left(),
    console=_CONSOLE,
    transient=transient,
    disable=not multihost.is_first()
    or (transient and not _CONSOLE.is_interactive),
  ) as progress:
    bar = progress.add_task(doing, total=total, completed=done)
    lines, programs = _Lines(progress), itertools.count(1)

    def advance(task: str, count: float) -> None:
      progress.update(bar, description=task, advance=count)
      lines.show(progress.tasks[bar])

    def count_program() -> None:
      if doing == _COMPILING and progress.tasks[bar].completed == done:
        advance(f"{_COMPILING} {next(programs)}", 0)

    _on_program.append(count_program)
    try:
      yield advance
    finally:
      _on_program.remove(count_program)


class _Done(rich.progress.MofNCompleteColumn):
  """The steps that are done, of their number if that is known."""

  def render(self, task: rich.progress.Task) -> rich.text.Text:
    if task.total is None:
      return rich.text.Text(f"{task.completed:g}")
    return super().render(task)


class _Left(rich.progress.TimeRemainingColumn):
  """The time that is left, once it is known."""

  def render(self, task: rich.progress.Task) -> rich.text.Text:
    if task.total is None or task.time_remaining is None:
      return rich.text.Text()
    return rich.text.Text.assemble("and ", super().render(task), " left")


class _Lines:
  """At most one line a minute, where a bar is drawn at its end only."""

  def __init__(self, progress: rich.progress.Progress) -> None:
    self._progress = progress
    self._began = time.monotonic()
    self._next = self._began + _EVERY

  def show(self, task: rich.progress.Task) -> None:
    """Says what is done, if it is time to."""
    now = time.monotonic()
    drawn = self._progress.disable or _CONSOLE.is_interactive
    if drawn or now < self._next:
      return
    self._next = now + _EVERY
    total = "" if task.total is None else f" of {task.total:g}"
    minutes = (now - self._began) / 60
    _CONSOLE.print(
      f"{task.description}: {task.completed:g}{total} after {minutes:.0f} min",
      markup=False,
      highlight=False,
      soft_wrap=True,
    )


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
