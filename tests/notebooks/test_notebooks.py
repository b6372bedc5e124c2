"""Notebooks: two forms are one, they install what they need, and run."""

import ast
import csv
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jupytext
import nbformat
import numpy as np
import pytest
from spent import at_most

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
# A notebook that has run may have written another Python file.
SCRIPTS = sorted(path.with_suffix(".py") for path in NOTEBOOKS.glob("*.ipynb"))
SCRIPT = NOTEBOOKS / "quickstart.py"
TPU_PLAN = NOTEBOOKS / "tpu_plan.py"
# Of all cores: on two, a notebook may take five minutes. What takes as long as
# the limit hangs, however busy the machine is.
SECONDS, LIMIT = 600, 1200


def _cells(path):
  return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_both_forms_hold_the_same_cells_and_no_outputs(script):
  path = script.with_suffix(".ipynb")
  assert _cells(path) == _cells(script)
  for cell in jupytext.read(path).cells:
    assert not cell.get("outputs")
    assert cell.get("execution_count") is None


@pytest.fixture
def execute(monkeypatch, tmp_path):
  """Runs a notebook in a Jupyter kernel; returns the value of an expression.

  The kernel has a folder of its own, and a user's settings of JAX. The notebook
  leaves nothing there but what is named.
  """
  for name in ("XLA_FLAGS", "MPLBACKEND"):
    monkeypatch.delenv(name)
  for name in [name for name in os.environ if name.startswith("JAX_NUMPY_")]:
    monkeypatch.delenv(name)
  # A module that a notebook writes and imports would leave a __pycache__.
  monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

  def run(name, expression, leaves=()):
    copy = tmp_path / f"{name}.ipynb"
    notebook = jupytext.read(NOTEBOOKS / copy.name)
    print_value = f"import json\nprint(json.dumps({expression}))"
    notebook.cells.append(nbformat.v4.new_code_cell(print_value))
    nbformat.write(notebook, copy)
    # Beside the Python of the tests.
    command = pathlib.Path(sys.executable).with_name("jupyter-execute")
    with at_most(SECONDS):
      done = subprocess.run(
        [command, "--inplace", copy],
        capture_output=True,
        text=True,
        timeout=LIMIT,
      )
    assert done.returncode == 0, done.stderr[-3000:]
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {copy.name, *leaves}
    *_, last = nbformat.read(copy, as_version=4).cells
    return json.loads("".join(part.text for part in last.outputs))

  return run


@pytest.mark.slow
def test_the_quickstart_answers_plots_and_shows(execute):
  scores, plotted, html = execute(
    "quickstart",
    "[[[*key, score] for key, score in scores.items()], "
    "[line.get_ydata().tolist() for line in figure.axes[0].lines], "
    "shaded.html]",
  )
  found = {(method, share): score for method, share, score in scores}
  assert len(found) == 1 + 4 * 3
  full = found["full", 1.0]
  assert full > 50
  assert found["kvzip", 0.25] > found["snapkv", 0.25]
  assert plotted == [
    [full, *(found[method, share] for share in (0.75, 0.5, 0.25))]
    for method in ("snapkv", "compactor", "keydiff", "kvzip")
  ]
  assert "keydiff, 25 %" in html


@pytest.mark.slow
def test_a_method_of_ones_own_is_on_the_leaderboard(execute, tmp_path):
  written = execute(
    "own_method",
    "pathlib.Path('results/leaderboard/leaderboard.csv').read_text()",
    leaves=["results", "valued_keys.py"],
  )
  # A command that fails does not stop the notebook.
  ran = nbformat.read(tmp_path / "own_method.ipynb", as_version=4)
  outputs = [output for cell in ran.cells for output in cell.get("outputs", [])]
  printed = [output.text for output in outputs if "text" in output]
  assert any(text.endswith("The contract holds.\r\n") for text in printed)
  found = {
    (row["method"], row["budget"]): float(row["score"])
    for row in csv.DictReader(io.StringIO(written))
  }
  assert len(found) == 11
  for budget in ("0.5", "0.25"):
    # Without the values it is KeyDiff.
    assert found["valued_keys:power=0", budget] == found["keydiff", budget]
    assert found["valued_keys", budget] > found["random", budget]


def test_ones_own_method_takes_public_names_and_programs_only():
  imported = _imported((NOTEBOOKS / "own_method.py").read_text())
  assert {"kvjax.methods.Head", "kvjax.methods.HeadwiseMethod"} <= imported
  internal = ("kvjax.experiments", "kvjax.models")
  assert not [name for name in imported if name.startswith(internal)]


def test_the_notebook_of_ones_own_method_leaves_devices_to_its_programs():
  """A TPU serves one process at a time."""
  for kind, source in _cells(NOTEBOOKS / "own_method.py"):
    if kind == "code" and "%%writefile" not in source:
      # Commands go on after a backslash.
      code = re.sub(r"^!(.*\\\n)*.*", "", source, flags=re.M)
      assert not [n for n in _imported(code) if re.match("jax|kvjax|valued", n)]


def _imported(source):
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


@pytest.mark.slow
def test_a_conversation_finds_with_ctkvr_what_the_full_cache_finds(execute):
  found = execute("conversation", "{k: sum(v) for k, v in found.items()}")
  assert found["full"] > found["keydiff"]
  assert found["ctkvr"] > found["keydiff"]


@pytest.mark.slow
def test_a_calibration_keeps_the_quality_that_it_promises(execute):
  kept, qualities, tau = execute(
    "calibrated",
    "[{k: v.tolist() for k, v in kept.items()}, "
    "[q.tolist() for q in qualities], TAU]",
  )
  assert {*kept} == {"keydiff", "compactor"}
  assert all(0 < share <= 1 for shares in kept.values() for share in shares)
  assert np.mean(kept["keydiff"]) < 1
  assert np.mean(qualities[0]) > tau - 0.1


@pytest.mark.slow
def test_it_shows_what_methods_keep(execute):
  shares, agreement, needle, html = execute(
    "what_methods_keep",
    "[shares.mean(axis=(1, 2)).tolist(), agreement.tolist(), kept_needle, "
    "known.html]",
  )
  np.testing.assert_allclose(shares, 0.25, atol=0.02)
  np.testing.assert_allclose(np.diag(agreement), 1)
  assert needle["keydiff"] > needle["snapkv"]
  assert "the question is prefilled with the text" in html


@pytest.mark.slow
def test_a_plan_counts_the_bytes_of_weights_and_caches(execute):
  weights, caches, fitting = execute("tpu_plan", "[weights, caches, fitting]")
  # What its card says: 8.03 billion weights.
  assert round(weights / 2e9, 2) == 8.03
  # Keys and values of 32 layers, 8 heads of 128 times 16 bits; and positions.
  full = 2 * 32 * 8 * 128 * 2 * 131_072
  assert full < caches["full"] < 1.02 * full
  assert 0.24 < caches["keydiff, 25 %"] / caches["full"] < 0.27
  assert 0.5 < caches["keydiff, 25 %, int8"] / caches["keydiff, 25 %"] < 0.55
  for of_chip in fitting.values():
    assert of_chip["full"] < of_chip["keydiff, 25 %"]


@pytest.mark.libtpu
def test_a_plan_names_the_memory_of_chips():
  from kvjax.experiments.compilation import chips

  (cell,) = (text for _, text in _cells(TPU_PLAN) if "CHIPS = {" in text)
  names = {}
  exec(cell.partition("SLICE")[0], names)
  chips.prepare_libtpu()
  for name, (hbm, bandwidth) in names["CHIPS"].items():
    chip = chips.Chip.load(name)
    assert round(chip.hbm_bytes / 2**20) == round(hbm / 2**20)
    assert chip.bytes_per_second == bandwidth


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
def test_it_installs_from_a_wheel_beside_it(install, tmp_path, gpu, build):
  wheel = tmp_path / "kvjax-0.1.0-py3-none-any.whl"
  wheel.touch()
  expected = ["-m", "pip", "install", "-q", f"jax[{build}]", str(wheel)]
  assert install(gpu) == expected


def test_it_installs_no_package_that_only_has_the_name(install):
  """The name is not taken on the index, where anybody may register it."""
  with pytest.raises(RuntimeError, match="put its wheel beside it"):
    install()


@pytest.fixture
def colab(monkeypatch, tmp_path):
  """Stands for Colab, where somebody uploads these files."""
  uploaded = []

  def upload():
    for name in uploaded:
      (tmp_path / name).touch()
    return dict.fromkeys(uploaded, b"")

  for name in ("google", "google.colab", "google.colab.files"):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
  sys.modules["google.colab.files"].upload = upload
  return uploaded


def test_on_colab_it_asks_for_the_wheel(install, colab, tmp_path, capsys):
  colab.append("kvjax-0.1.0-py3-none-any.whl")
  assert install()[-1] == str(tmp_path / colab[0])
  assert capsys.readouterr().out.startswith("Upload the wheel of kvjax, from")
  # Once it is there, it does not ask again.
  (name,) = colab
  colab.clear()
  assert install()[-1] == str(tmp_path / name)
  assert not capsys.readouterr().out


@pytest.mark.parametrize("others", [[], ["notes.txt"]], ids=["none", "other"])
def test_on_colab_too_it_says_so_if_there_is_no_wheel(install, colab, others):
  colab.extend(others)
  with pytest.raises(RuntimeError, match="put its wheel beside it"):
    install()


def test_it_installs_from_the_checkout_that_it_stands_in(install, monkeypatch):
  monkeypatch.chdir(NOTEBOOKS)
  assert install()[-1] == str(NOTEBOOKS.parent)


def test_it_asks_for_a_restart_where_old_packages_are_loaded(
  install, monkeypatch
):
  monkeypatch.chdir(NOTEBOOKS)
  monkeypatch.setattr(np, "__version__", "1.0")
  with pytest.raises(RuntimeError, match="Restart the session"):
    install()
