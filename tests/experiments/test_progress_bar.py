"""Progress bars on a terminal of 80 columns."""

import importlib.util
import io
import types

import jax
import jax.monitoring
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


@pytest.mark.parametrize("total", [None, 8])
def test_a_bar_says_no_number_that_is_unknown(monkeypatch, total):
  shown = io.StringIO()
  monkeypatch.setattr(
    progress_bar, "_CONSOLE", rich.console.Console(file=shown, width=80)
  )
  with progress_bar.progress_bar(total, "counting") as advance:
    advance("counting", 3 if total is None else 0)
  (line,) = shown.getvalue().splitlines()
  done = "3" if total is None else "0/8"
  assert line.rstrip().endswith(f" {done} in 0:00:00")


@pytest.mark.parametrize("widgets", [True, False])
def test_in_jupyter_a_bar_needs_widgets(monkeypatch, widgets):
  monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name: "ipywidgets" if widgets else None
  )
  console = progress_bar._stderr()
  assert console.is_jupyter is widgets
  assert widgets or not console.is_terminal


def a_program():
  jax.monitoring.record_event_duration_secs(progress_bar._COMPILED, 0.1)


def test_it_counts_programs_until_the_first_step(monkeypatch):
  seen = []
  monkeypatch.setattr(
    progress_bar._Lines,
    "show",
    lambda self, task: seen.append(task.description),
  )
  with progress_bar.progress_bar(2) as advance:
    jax.jit(lambda x: x * 3).lower(0.0).compile()
    a_program()
    advance("answering", 1)
    a_program()
  with progress_bar.progress_bar(2, "timing"):
    a_program()
  a_program()
  assert seen == ["compiling 1", "compiling 2", "answering"]


def test_lines_stand_for_a_bar_where_there_is_no_terminal(monkeypatch):
  shown = io.StringIO()
  monkeypatch.setattr(
    progress_bar, "_CONSOLE", rich.console.Console(file=shown, width=80)
  )
  now = [0]
  clock = types.SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(progress_bar, "time", clock)
  with progress_bar.progress_bar(276) as advance:
    for now[0] in (59, 61):
      a_program()
    for now[0] in (90, 121, 170, 185):
      advance("niah", 4)
  *lines, _ = shown.getvalue().splitlines()
  assert lines == [
    "compiling 2: 0 of 276 after 1 min",
    "niah: 8 of 276 after 2 min",
    "niah: 16 of 276 after 3 min",
  ]
