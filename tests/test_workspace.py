"""The commands a newcomer types: what they say, and what they set up."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A Python that says it is another version; it leaves a note when it is asked
# for a virtual environment, and makes none.
_PYTHON = """#!{python}
import pathlib, sys
sys.version_info = {version}
if sys.argv[1] == "-c":
  exec(sys.argv[2])
else:
  pathlib.Path("asked").write_text(" ".join(sys.argv))
  sys.exit(1)
"""


@pytest.fixture
def fresh(tmp_path):
  """Runs make in a fresh checkout where only the given Pythons exist."""
  for name in ("Makefile", "pyproject.toml"):
    shutil.copy(ROOT / name, tmp_path)
  programs = tmp_path / "bin"
  programs.mkdir()

  def make(target, **pythons):
    for name, version in pythons.items():
      program = programs / name.replace("_", ".")
      program.write_text(_PYTHON.format(python=sys.executable, version=version))
      program.chmod(0o755)
    return subprocess.run(
      [shutil.which("make"), target],
      cwd=tmp_path,
      env={"PATH": str(programs)},
      capture_output=True,
      text=True,
    )

  return make


def test_the_map_is_short_and_its_folders_are_there():
  lines = (ROOT / "WORKSPACE.md").read_text(encoding="utf-8").splitlines()
  assert len(lines) <= 60
  for line in lines:
    if not line.startswith("|") or line.startswith(("| Folder", "| -")):
      continue
    paths = re.findall(r"`([^`]+)`", line.split("|")[1])
    assert paths, line
    for path in paths:
      assert [*ROOT.glob(path)], path


@pytest.mark.parametrize("pythons", [{}, {"python3": (3, 11, 9)}])
@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_a_python_too_old_gets_one_sentence(fresh, target, pythons):
  result = fresh(target, **pythons)
  assert result.returncode == 2
  assert result.stdout == ""
  assert len(result.stderr.splitlines()) == 1
  assert "kvjax needs Python 3.12 or newer" in result.stderr


def test_the_first_python_new_enough_makes_the_environment(fresh, tmp_path):
  fresh(
    "test", python3=(3, 11, 9), python3_12=(3, 12, 1), python3_13=(3, 13, 0)
  )
  asked = (tmp_path / "asked").read_text()
  assert re.fullmatch(r"\S+/python3\.12 -m venv .*\.venv", asked)


@pytest.mark.parametrize("text", ["README.md", ".ci/run", ".ci/nightly"])
def test_named_commands_are_the_makefiles(text):
  targets = set(
    re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
  )
  lines = re.findall(r"^\s*make (.+)", (ROOT / text).read_text(), re.M)
  # Variables come last.
  plain = [re.split(r"\b[A-Z_]+=", line)[0] for line in lines]
  words = {word for line in plain for word in line.split()}
  named = {word for word in words if not word.startswith("--")}
  assert named
  assert named <= targets


def test_no_two_modules_differ_by_an_s():
  """But the protocol of a model, and the package of our own."""
  folders = [ROOT / name for name in ("kernels", "kvjax", "models")]
  paths = [
    path
    for folder in (*folders, ROOT / "experiments")
    for path in folder.rglob("*.py")
  ]
  names = {path.stem for path in paths}
  names |= {path.parent.name for path in paths}
  alike = {name for name in names if f"{name}s" in names}
  assert alike == {"model"}
