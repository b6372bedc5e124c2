"""The progress of bytes that are copied from or to other machines."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bytes_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
  """Shows a bar on a terminal; yields a function of the bytes so far.

  Args:
    label: what is copied, such as "fetching model.gguf".
    total: number of bytes.
  """
  # Most programs that import kvjax never show one.
  import rich.console
  import rich.progress

  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(
    rich.progress.TextColumn("{task.description}"),
    rich.progress.BarColumn(),
    rich.progress.DownloadColumn(),
    rich.progress.TransferSpeedColumn(),
    rich.progress.TimeRemainingColumn(),
    console=console,
    transient=True,
    disable=not console.is_interactive,
  ) as progress:
    bar = progress.add_task(label, total=total)
    yield lambda completed: progress.update(bar, completed=completed)
