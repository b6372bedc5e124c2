"""The command that lists the programs and starts them."""

import ast
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tomllib

import pytest

import kvjax
from kvjax.experiments import main as command

ROOT = pathlib.Path(__file__).parents[2]


def run(monkeypatch, *arguments):
  monkeypatch.setattr(command.sys, "argv", ["kvjax", *arguments])
  command.main()


def test_every_program_is_listed_with_its_first_line(monkeypatch, capsys):
  run(monkeypatch)
  out = capsys.readouterr().out
  found = dict(re.findall(r"^  (\w+) +(.+)$", out, re.MULTILINE))
  programs = {
    path.stem: path.read_text(encoding="utf-8")
    for path in (ROOT / "experiments").glob("*.py")
    if "\n  cli.run" in path.read_text(encoding="utf-8")
  }
  assert found.keys() == programs.keys()
  assert "compare" in found
  for name, said in found.items():
    assert programs[name].startswith(f'"""{said}\n')
  assert max(map(len, out.splitlines())) <= 80


def test_an_unknown_program_is_refused_with_a_guess(monkeypatch, capsys):
  with pytest.raises(SystemExit) as stop:
    run(monkeypatch, "compar")
  assert stop.value.code == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert err.startswith("There is no program 'compar' (did you mean compare")
  assert len(err.splitlines()) == 1


def test_a_program_is_started_with_its_flags(run_binary):
  done = run_binary("kvjax.experiments.main", "generate_documents", "--output")
  assert done.returncode == 2
  assert "--help lists the flags" in done.stderr
  done = run_binary("kvjax.experiments.main", "leaderboard", "--help")
  assert done.returncode == 0
  assert "Merges runs into one leaderboard" in done.stdout
  assert "--kvpress" in done.stdout


def test_an_interrupt_while_a_program_is_imported_ends_it(monkeypatch, capsys):
  def interrupted(*args, **kwargs):
    raise KeyboardInterrupt

  def end(code):
    raise SystemExit(code)

  monkeypatch.setattr(command.runpy, "run_module", interrupted)
  # Which ends the process at once.
  monkeypatch.setattr(command.exits, "leave", end)
  with pytest.raises(SystemExit) as stop:
    run(monkeypatch, "compare")
  assert stop.value.code == 130
  assert capsys.readouterr().err == "Stopped.\n"


def test_the_package_of_the_programs_lists_them_too(run_binary):
  done = run_binary("kvjax.experiments")
  assert done.returncode == 0
  assert done.stdout == f"{command.listing()}\n"


@pytest.mark.parametrize(
  "command",
  [["kvjax.experiments"], ["kvjax.experiments.leaderboard", "--help"]],
  ids=lambda command: command[0],
)
def test_a_reader_that_has_gone_ends_it_without_a_word(command):
  """As `kvjax | head -1` does, once the line is read."""
  reader, writer = os.pipe()
  os.close(reader)
  done = subprocess.run(
    [sys.executable, "-m", *command], stdout=writer, stderr=subprocess.PIPE
  )
  os.close(writer)
  assert done.returncode != 0
  assert done.stderr == b""


def test_the_package_installs_it(monkeypatch, capsys):
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  module, _, function = project["scripts"]["kvjax"].partition(":")
  before = signal.getsignal(signal.SIGINT)
  monkeypatch.setattr(sys, "argv", ["kvjax", "--version"])
  getattr(importlib.import_module(module), function)()
  signal.signal(signal.SIGINT, before)
  assert capsys.readouterr().out == f"kvjax {kvjax.__version__}\n"


def test_it_says_its_version(monkeypatch, capsys):
  run(monkeypatch, "--version")
  assert capsys.readouterr().out == f"kvjax {kvjax.__version__}\n"


def test_programs_are_shown_as_users_call_them():
  """Not by the names of their modules."""
  for name in command.PROGRAMS:
    source = (ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source))
    target = name.replace("_", "-")
    call = rf"^  (?:kvjax {name}|make {target})\b"
    assert re.search(call, text, re.MULTILINE), name
    assert "kvjax.experiments" not in text, name
