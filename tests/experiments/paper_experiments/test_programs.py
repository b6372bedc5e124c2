"""Programs that make experiments are called as they want to be called."""

import os
import re
import signal
import sys
import threading
import time

import pytest
import rich.console

from kvjax.experiments.paper_experiments import programs, report
from kvjax.experiments.paper_experiments.records import Experiment, Program
from kvjax.experiments.paper_experiments.registry import EXPERIMENTS

FIRST = Program(
  "first", "nowhere", ["--x={folder}/y"], {"model": "model", "essay": "text"}
)
SECOND = Program("second", "elsewhere", takes={"data": "data"}, needs="data")
THIRD = Program("third", "wherever", unless="essay")
OWN = Experiment(
  *("E9.9", "A paper", "nothing", "A model", "LongBench", "needles", 1),
  (FIRST, SECOND, THIRD),
  ("Ours is best.",),
)


def called(monkeypatch, codes):
  """Calls are noted, and come to these codes."""
  lines = []

  def run(command):
    lines.append(command)
    return codes.pop(0)

  monkeypatch.setattr(programs, "_run", run)
  return lines


def test_the_users_flags_are_passed_on_under_their_names_there(
  tmp_path, monkeypatch
):
  lines = called(monkeypatch, [0, 0])
  console = rich.console.Console(width=200, record=True)
  given = {"model": "dir", "essay": "a.txt", "data": "b.zip", "seed": "3"}
  report.call(OWN, "dir", given, tmp_path, console)
  python = [sys.executable, "-m"]
  first = [f"--output={tmp_path}/first", f"--x={tmp_path}/y", "--model=dir"]
  second = [f"--output={tmp_path}/second", "--data=b.zip"]
  assert lines == [
    [*python, "kvjax.experiments.nowhere", *first, "--text=a.txt"],
    [*python, "kvjax.experiments.elsewhere", *second],
  ]
  text = (tmp_path / "paper.md").read_text()
  assert "dir. The paper ran A model and used LongBench; numbers may " in text
  assert "python -m kvjax.experiments.elsewhere --output=" in text
  assert "The paper: Ours is best." in text


def test_what_needs_a_flag_or_its_absence_is_left_out(tmp_path, monkeypatch):
  lines = called(monkeypatch, [0, 0])
  quiet = rich.console.Console(quiet=True)
  report.call(OWN, "ref", {}, tmp_path, quiet)
  modules = [line[2] for line in lines]
  assert modules == ["kvjax.experiments.nowhere", "kvjax.experiments.wherever"]
  assert (
    "ref on generated data: not the paper's model; orders may be"
    in (tmp_path / "paper.md").read_text()
  )


def test_a_program_that_fails_ends_it_all(tmp_path, monkeypatch):
  lines = called(monkeypatch, [5, 0])
  with pytest.raises(SystemExit, match="5"):
    report.call(
      OWN, "ref", {"data": "x"}, tmp_path, rich.console.Console(quiet=True)
    )
  assert len(lines) == 1
  assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_the_program_that_runs():
  sleep = "import time; print(flush=True); time.sleep(60)"
  timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
  timer.start()
  began = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    programs._run([sys.executable, "-S", "-c", sleep])
  assert time.monotonic() - began < 30


def test_programs_know_the_flags_that_they_are_called_with(
  run_binary, tmp_path
):
  every = [p for e in EXPERIMENTS.values() for p in e.programs]
  for module in {program.module for program in every}:
    told = run_binary(f"kvjax.experiments.{module}", "--help")
    known = set(
      re.findall(r"^  --(?:\[no\])?(\w+):", told.stdout, re.MULTILINE)
    )
    for program in every:
      given = dict.fromkeys(program.takes, "1")
      if program.module == module:
        for flag in programs.command(program, tmp_path, given)[1:]:
          assert flag[2:].partition("=")[0] in known, (module, flag)
