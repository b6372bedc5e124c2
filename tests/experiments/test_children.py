"""Programs that run other programs end as these end, and the reverse."""

import os
import signal
import subprocess
import sys
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


# Runs another program, as trials do.
RUNS_ANOTHER = """
import sys
from kvjax.experiments import exits, interrupts
from kvjax.experiments.run import children
try:
  with interrupts.interruptible():
    children.run("child", sys.argv[1:])
except exits.Preempted:
  sys.exit(143)
except KeyboardInterrupt:
  sys.exit(130)
"""
# Takes three seconds to send what it has written to an address.
SENDS = """
import sys, time
from kvjax import addresses
from kvjax.experiments import interrupts
from kvjax.experiments.run import outputs, sending
real = addresses.Place.send
def send(*given):
  print("sending", flush=True)
  time.sleep(3)
  real(*given)
addresses.Place.send = send
with interrupts.interruptible(), sending.sending():
  (outputs.run_folder(sys.argv[1]) / "answers").write_text("all")
  print("answered", flush=True)
  time.sleep(60)
"""


@pytest.mark.parametrize(
  ("number", "to_all", "code"),
  [
    # Ctrl-C, to which both programs of a terminal listen.
    (signal.SIGINT, True, 130),
    (signal.SIGINT, False, 130),
    (signal.SIGTERM, True, 143),
    (signal.SIGTERM, False, 143),
  ],
)
def test_what_a_program_has_written_is_sent_before_it_ends(
  program, tmp_path, number, to_all, code
):
  program(SENDS)
  there = tmp_path / "there" / "runs"
  command = [sys.executable, "-c", RUNS_ANOTHER, f"file://{there}"]
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, text=True, start_new_session=True
  ) as process:
    assert process.stdout.readline() == "answered\n"
    send = os.killpg if to_all else os.kill
    send(process.pid, number)
    try:
      assert process.wait(60) == code
    finally:
      process.kill()
    # The program that is run has ended first.
    assert (there / "answers").read_text() == "all"
    assert process.stdout.read() == "sending\n"
