"""The commands of further pages start, and say what they will cost."""

import os
import pathlib
import shutil

import page_commands
import pytest
from made_up_gates import write_kvzap

import kvjax

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
  "docs/methods/README.md",
  "docs/methods/ctkvr.md",
  "docs/methods/decoding.md",
  "docs/methods/expected.md",
  "docs/methods/gates.md",
  "docs/models.md",
  "docs/reproducing.md",
  "docs/results.md",
  "docs/retrieval.md",
)
_SMALL = "--model=reference --length=512 --samples=1"
# The ends of commands, by their starts; what has none is not rehearsed.
ENDS = {
  "compare": f"{_SMALL} --dry_run",
  "evaluate --model=smollm2-135m-instruct --benchmark=arithmetic": (
    "--model=reference --samples=1 --dry_run"
  ),
  "evaluate": f"{_SMALL} --dry_run",
  "calibrate --": f"{_SMALL} --tasks=niah_single_1 --samples=3 --others=3 "
  "--held_out=1 --retention=0.3,0.5,0.7,0.9",
  "reproduce": f"{_SMALL} --dry_run",
  "calibrate_queries": "--model=reference --samples=2 --length=64",
  "retrieval_recall": f"{_SMALL} --tasks=niah_single_2 --budget=64 --batch=1",
  "show_kept": "--model=reference",
}
# Only users have these files.
OF_USERS = "--squad=FILE"


def rehearsed(page):
  """The commands of a page that are short with these ends."""
  found = page_commands.commands((ROOT / page).read_text())
  return [
    command
    for command in found
    if any(command.startswith(f"kvjax {start}") for start in ENDS)
    and OF_USERS not in command
  ]


@pytest.fixture
def place(tmp_path):
  """A folder with the documentation, and what the pages' commands have made."""
  (tmp_path / "docs").mkdir()
  shutil.copy(ROOT / "docs" / "notes.txt", tmp_path / "docs")
  for name in ("results", "results/leaderboard"):
    (tmp_path / name).mkdir()
  lm = kvjax.load("reference")
  text = lm.text.encode((ROOT / "docs" / "notes.txt").read_text())
  found = kvjax.calibrate_queries(lm.model, lm.params, [text])
  spec, layers = lm.model.geometry.layers[0], lm.model.geometry.num_layers
  for folder in (tmp_path / "results", tmp_path / "results" / "leaderboard"):
    found.save(folder / "queries.safetensors")
    sizes = (lm.config.hidden_size, spec.kv_heads, layers)
    write_kvzap(folder / "gate", *sizes, score_range=[-9, -1])
  programs = tmp_path / "bin"
  programs.mkdir()
  page_commands.write_kvjax(programs, ENDS)
  return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_start(page, place):
  path = os.pathsep.join([str(place / "bin"), os.environ["PATH"]])
  for command in rehearsed(page):
    page_commands.run(command, place, os.environ | {"PATH": path})


def test_the_pages_have_such_commands():
  assert all(map(rehearsed, PAGES))
  assert sum(len(rehearsed(page)) for page in PAGES) >= 30
