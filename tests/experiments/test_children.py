"""Programs that run other programs end as these end, and the reverse."""

import os
import signal
import threading
import time

import pytest

from kvjax.experiments import exits
from kvjax.experiments.run import children

WAITING = """
import os, pathlib, signal, sys, time
path = pathlib.Path(sys.argv[1])
def stop(number, frame):
  path.write_text("stopped")
  sys.exit(143)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.SIG_IGN)
path.write_text("started")
time.sleep(60)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
  """Makes a module of a text; returns its name."""
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))

  def make(text):
    (tmp_path / "child.py").write_text(text)
    return "child"

  return make


def interrupt_once_there(path):
  while not path.exists() or not path.read_text():
    time.sleep(0.01)
  os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("keep", [False, True])
def test_an_interrupt_lets_the_program_that_runs_stop(program, tmp_path, keep):
  path = tmp_path / "state"
  threading.Thread(target=interrupt_once_there, args=(path,)).start()
  with pytest.raises(KeyboardInterrupt):
    children.run(program(WAITING), [str(path)], keep=keep)
  # It was not killed.
  assert path.read_text() == "stopped"


@pytest.mark.parametrize(
  ("ends", "raised"),
  [
    ("os.kill(os.getpid(), 2)", KeyboardInterrupt),
    ("os._exit(130)", KeyboardInterrupt),
    ("os.kill(os.getpid(), 15)", exits.Preempted),
    ("os._exit(143)", exits.Preempted),
  ],
)
def test_a_program_that_is_ended_ends_what_started_it(program, ends, raised):
  text = f"import os, signal\nsignal.signal(2, signal.SIG_DFL)\n{ends}"
  with pytest.raises(KeyboardInterrupt) as stop:
    children.run_or_exit(program(text), [])
  assert type(stop.value) is raised


def test_what_is_printed_is_shown_or_kept(program, capfd):
  name = program("import sys\nprint(sys.argv[1])\nsys.exit(3)")
  with pytest.raises(SystemExit) as failed:
    children.run_or_exit(name, ["shown"])
  assert failed.value.code == 3
  assert capfd.readouterr().out == "shown\n"
  assert children.run(name, ["kept"], keep=True) == (3, "kept\n")
  assert not capfd.readouterr().out


def test_a_program_that_aborts_ends_with_the_code_that_shells_show(program):
  """As one does that JAX ends because another host is gone."""
  with pytest.raises(SystemExit) as failed:
    children.run_or_exit(program("import os\nos.abort()"), [])
  assert failed.value.code == 134
