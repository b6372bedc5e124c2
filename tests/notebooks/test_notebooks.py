"""Notebooks: two forms are one, they install what they need, and run."""

import importlib.util
import pathlib
import runpy
import shutil
import subprocess
import sys

import jupytext
import numpy as np
import pytest

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
SCRIPTS = sorted(NOTEBOOKS.glob("*.py"))
SCRIPT = NOTEBOOKS / "quickstart.py"


def _cells(path):
  return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_both_forms_hold_the_same_cells_and_no_outputs(script):
  path = script.with_suffix(".ipynb")
  assert _cells(path) == _cells(script)
  for cell in jupytext.read(path).cells:
    assert not cell.get("outputs")
    assert cell.get("execution_count") is None


@pytest.mark.slow
def test_it_answers_plots_and_shows(monkeypatch, tmp_path):
  """All methods at one budget: each budget compiles programs of its own."""
  script, folder = tmp_path / "script.py", tmp_path / "empty"
  source, shares = SCRIPT.read_text(), "SHARES = (0.5, 0.25, 0.1)\n"
  assert shares in source
  script.write_text(source.replace(shares, "SHARES = (0.25,)\n"))
  folder.mkdir()
  monkeypatch.chdir(folder)
  left = runpy.run_path(str(script))
  scores = left["scores"]
  assert len(scores) == 1 + 3
  assert scores["full", 1.0] == 100
  assert scores["keydiff", 0.25] > scores["snapkv", 0.25]
  (axes,) = left["figure"].axes
  for name, line in zip(left["METHODS"], axes.lines, strict=True):
    assert line.get_ydata().tolist() == [100, scores[name, 0.25]]
    assert np.all(np.diff(line.get_xdata()) < 0)
  assert "keydiff, 25 %" in left["shaded"].html
  assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_method_of_ones_own_is_on_the_leaderboard(
  monkeypatch, tmp_path, capsys
):
  monkeypatch.chdir(tmp_path)
  left = runpy.run_path(str(NOTEBOOKS / "own_method.py"))
  found = {(method, share): score for share, score, method, _ in left["board"]}
  assert len(found) == 11
  for share in left["SHARES"]:
    # Without the values it is KeyDiff.
    assert found["valued_keys:power=0", share] == found["keydiff", share]
    assert found["valued_keys", share] > found["random", share]
  lines = capsys.readouterr().out.splitlines()
  assert lines[-12].split() == ["method", "kept", "MiB", "found"]
  assert lines[-11].split()[0] == "full"
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_conversation_finds_with_ctkvr_what_the_full_cache_finds(
  monkeypatch, tmp_path, capsys
):
  monkeypatch.chdir(tmp_path)
  left = runpy.run_path(str(NOTEBOOKS / "conversation.py"))
  found = {name: sum(of_turns) for name, of_turns in left["found"].items()}
  assert found["full"] > found["keydiff"]
  assert found["ctkvr"] > found["keydiff"]
  assert capsys.readouterr().out.rstrip()
  assert not list(tmp_path.iterdir())


def _install(path):
  """The first cell of code, which installs kvjax where it is missing."""
  return next(text for kind, text in _cells(path) if kind == "code")


@pytest.fixture
def install(monkeypatch, tmp_path):
  """Runs the cell where kvjax is missing; returns what it calls."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

  def run(gpu=False):
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda c, check: calls.append(c))
    monkeypatch.setattr(shutil, "which", lambda name: name if gpu else None)
    exec(_install(SCRIPT), {})
    ((python, *command),) = calls
    assert python == sys.executable
    return command

  return run


def test_all_notebooks_install_alike():
  assert len({_install(path) for path in SCRIPTS}) == 1


@pytest.mark.parametrize(("gpu", "build"), [(False, "cpu"), (True, "cuda13")])
def test_it_installs_the_package(install, gpu, build):
  expected = ["-m", "pip", "install", "-q", f"jax[{build}]", "kvjax"]
  assert install(gpu) == expected


def test_it_installs_from_the_checkout_that_it_stands_in(install, monkeypatch):
  monkeypatch.chdir(NOTEBOOKS)
  assert install()[-1] == str(NOTEBOOKS.parent)


def test_it_asks_for_a_restart_where_old_packages_are_loaded(
  install, monkeypatch
):
  monkeypatch.setattr(np, "__version__", "1.0")
  with pytest.raises(RuntimeError, match="Restart the session"):
    install()
