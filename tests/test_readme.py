"""What the README shows is so."""

import pathlib
import re
import shutil

import pytest

import kvjax
from kvjax.methods import METHODS
from kvjax.retrieval import RETRIEVALS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_interface_takes_twelve_lines():
  lines = [line for line in CODE[0].splitlines() if line]
  assert len(lines) == 12


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_code_runs(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "notes.txt").write_text("The sky is blue. Ann called.\n" * 20)
  shutil.copytree(ROOT / "models" / "reference", "models/reference")
  names = {}
  for code in CODE:
    exec(code, names)
  printed = capsys.readouterr().out
  assert printed.index("KeyDiff(") < printed.index("SnapKV(")
  assert len(names["answers"].rows()) == 1


def test_the_methods_listed_as_delivered_are_those_there_are():
  rows = re.findall(r"^\| `(\w+)` .*\| (\w+) +\|$", README, re.MULTILINE)
  delivered = {name for name, status in rows if status == "delivered"}
  assert delivered == {*METHODS, *RETRIEVALS}


def test_methods_that_commands_name_exist():
  for names in re.findall(r"--methods=(\S+)", README):
    for name in names.split(","):
      kvjax.get_plan(name, kvjax.Retention(0.5))


def test_linked_files_exist():
  for target in re.findall(r"\]\(([^)]+)\)", README):
    assert (ROOT / target).exists(), target
