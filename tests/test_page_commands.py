"""The commands of the first pages run, with settings as small as they get."""

import json
import os
import pathlib
import re
import shutil

import page_commands
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
  "README",
  "docs/getting_started",
  "docs/benchmarks",
  "docs/calibration",
)
_SMALL = "--model=reference --length=320 --samples=1"
_ANSWERS = f"{_SMALL} --tasks=niah_single_1 --methods=full,keydiff"
# The ends of commands, by their starts.
ENDS = {
  "compare --text": "--model=reference",
  "compare": f"{_SMALL} --retention=0.5",
  "show_kept": "--model=reference",
  "evaluate --benchmark=aime25": "--model=reference --max_new_tokens=8 "
  "--draws=1",
  "evaluate --benchmark": f"{_ANSWERS} --retention=0.5",
  "evaluate": _ANSWERS,
  "trials --trials=2 -- ": f"{_ANSWERS} --retention=0.5",
  "trials": f"{_ANSWERS} --calibrations=OUT/records",
  "calibrate": f"{_SMALL} --tasks=niah_single_1 --methods=keydiff "
  "--retention=0.3,0.5,0.7,0.9 --samples=3 --others=3 --held_out=1",
  "reproduce E": f"{_SMALL} --tasks=niah_single_1 --dry_run",
}


def small(command):
  """Asks for two trials, and for no data that are not here."""
  command = re.sub(r"--trials=\d+", "--trials=2", command)
  command = command.replace("--data=FILE", "--data=problems.json")
  return command.replace("--data=DIR", "")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, tmp_path):
  programs = tmp_path / "bin"
  programs.mkdir()
  page_commands.write_kvjax(programs, ENDS)
  (tmp_path / "docs").mkdir()
  shutil.copy(ROOT / "docs" / "notes.txt", tmp_path / "docs")
  problem = {"problem": "What is 1 + 1?", "answer": "2"}
  (tmp_path / "problems.json").write_text(json.dumps([problem]))
  path = os.pathsep.join([str(programs), os.environ["PATH"]])
  for command in page_commands.commands((ROOT / f"{page}.md").read_text()):
    page_commands.run(small(command), tmp_path, os.environ | {"PATH": path})


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_have_commands(page):
  found = page_commands.commands((ROOT / f"{page}.md").read_text())
  assert len(found) >= 2
  assert not any("\\" in command for command in found)
