"""Progress bars on a terminal of 80 columns."""

import io

import rich.console

from kvjax.experiments.run import progress_bar


def test_a_bar_says_which_time_is_left(monkeypatch):
  shown = io.StringIO()
  monkeypatch.setattr(
    progress_bar, "_CONSOLE", rich.console.Console(file=shown, width=80)
  )
  with progress_bar.progress_bar(276, "compiling") as advance:
    advance("answering", 276)
  (line,) = shown.getvalue().splitlines()
  assert line.startswith("answering ")
  assert line.rstrip().endswith(" 276/276 in 0:00:00 and 0:00:00 left")
  assert len(line) <= 80
