"""Progress bars on a terminal of 80 columns."""

import importlib.util
import io

import pytest
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


@pytest.mark.parametrize("widgets", [True, False])
def test_in_jupyter_a_bar_needs_widgets(monkeypatch, widgets):
  monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name: "ipywidgets" if widgets else None
  )
  console = progress_bar._stderr()
  assert console.is_jupyter is widgets
  assert widgets or not console.is_terminal
