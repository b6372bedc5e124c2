"""The notebook: its two forms are one, it installs what it needs, it runs."""

import importlib.util
import pathlib
import runpy
import shutil
import subprocess

import jupytext
import numpy as np
import pytest

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
SCRIPT = NOTEBOOKS / "quickstart.py"


def _cells(path):
  return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def test_both_forms_hold_the_same_cells_and_no_outputs():
  path = SCRIPT.with_suffix(".ipynb")
  assert _cells(path) == _cells(SCRIPT)
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


@pytest.fixture
def install(monkeypatch, tmp_path):
  """Runs the first cell where kvjax is missing; returns what it calls."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  source = next(text for kind, text in _cells(SCRIPT) if kind == "code")

  def run(repository, gpu=False):
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda c, check: calls.append(c))
    monkeypatch.setattr(shutil, "which", lambda name: name if gpu else None)
    exec(source.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}"), {})
    return [" ".join(map(str, call)) for call in calls]

  return run


@pytest.mark.parametrize(("gpu", "build"), [(False, "cpu"), (True, "cuda12")])
def test_it_installs_from_a_clone(install, gpu, build):
  clone, pip = install("some/where", gpu)
  assert clone.startswith("git clone --depth=1 some/where /")
  target = clone.split()[-1]
  assert pip.endswith(f"-m pip install -q jax[{build}] {target}")


def test_it_asks_where_to_clone_from(install):
  with pytest.raises(RuntimeError, match="Set REPOSITORY"):
    install("")


def test_it_asks_for_a_restart_where_old_packages_are_loaded(
  install, monkeypatch
):
  monkeypatch.setattr(np, "__version__", "1.0")
  with pytest.raises(RuntimeError, match="Restart the session"):
    install("some/where")
