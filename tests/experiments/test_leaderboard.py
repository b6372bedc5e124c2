"""The binary: a leaderboard of runs, and one sentence for what is wrong."""

import os

import pytest
from made_runs import make_answer, make_record


def test_runs_become_one_leaderboard(run_binary, tmp_path):
  answers = [make_answer("full", task="vt", length=512)]
  make_record(answers, tmp_path / "runs" / "a")
  make_record(answers, tmp_path / "runs" / "b", protocol="query-aware")
  make_record(answers, tmp_path / "runs" / "c")
  (tmp_path / "runs" / "c" / "summary.json").unlink()
  output, kvpress = tmp_path / "new" / "board", tmp_path / "kvpress"
  output.mkdir(parents=True)
  # One plot of an earlier leaderboard, and one of somebody's own.
  for name in ("leaderboard_3.png", "leaderboard_talk.png"):
    (output / name).touch()
  result = run_binary(
    "kvjax.experiments.leaderboard",
    tmp_path / "runs" / "a",
    f"--output={output}",
    tmp_path / "runs",
    f"--kvpress={kvpress}",
  )
  assert result.returncode == 0, result.stderr
  assert "2 runs" in result.stdout
  assert "query-aware" in result.stdout
  assert "its run is unfinished" in " ".join(result.stdout.split())
  board = (output / "leaderboard.md").read_text()
  assert "c is left out: its run is unfinished; repeat the command" in board
  lines = (output / "leaderboard.csv").read_text().splitlines()
  assert len(lines) == 3
  # By budget, and every number, of both runs.
  assert board.count("| full |") == 4
  assert (output / "leaderboard.html").read_text().count("</table>") == 4
  assert {path.name for path in output.glob("*.png")} == {
    "leaderboard_1.png", "leaderboard_2.png", "leaderboard_talk.png"
  }  # fmt: skip
  assert {path.name for path in kvpress.iterdir()} == {
    "kvjax_ruler__512__tiny__no_press__0.00",
    "kvjax_ruler__512__tiny__no_press__0.00__whole_prompt",
  }
  assert all(len(list(path.iterdir())) == 3 for path in kvpress.iterdir())


def test_a_leaderboard_of_addresses_is_that_of_their_folders(
  run_binary, tmp_path
):
  answers = [make_answer("full", task="vt", length=512)]
  there, here = tmp_path / "there", tmp_path / "here"
  for name in "abc":
    make_record(answers, there / "runs" / name)
  (there / "runs" / "c" / "summary.json").unlink()
  # The first to be fetched is the newest.
  os.utime(there / "runs" / "a" / "summary.json", (2e9, 2e9))
  address = f"file://{there}"
  said = []
  for runs, board in ((there, here), (address, f"{address}/board")):
    ranked = run_binary(
      *("kvjax.experiments.leaderboard", f"{runs}/runs", f"--output={board}")
    )
    assert ranked.returncode == 0, ranked.stderr
    said.append(ranked.stdout)
  assert f"plots in {address}/board" in said[1]
  assert "kvjax-" not in said[1]
  names = {path.name for path in here.iterdir()}
  assert {path.name for path in (there / "board").iterdir()} == names
  for name in ("leaderboard.csv", "leaderboard.md", "leaderboard.html"):
    local = (here / name).read_text()
    named = (there / "board" / name).read_text()
    assert named == local.replace(f"{there}/", f"{address}/")
  board = (there / "board" / "leaderboard.md").read_text()
  old, new = f"{address}/runs/b", f"{address}/runs/a"
  assert f"1 line of {old} gave way to those of {new}, which is newer" in board
  assert f"{address}/runs/c is left out" in board


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    ([], "Name the folders that hold runs, as in kvjax leaderboard results."),
    (["{folder}"], "{folder} holds no run"),
    (["file://{folder}/no"], "file://{folder}/no holds no run"),
    (["gs://bucket"], "gs://bucket/ names no file or folder; give"),
    (["{folder}", "--model=x"], "--help lists the flags."),
    (["{folder}", "--kvpress=/proc/no"], "/proc/no cannot be written"),
  ],
)
def test_what_is_wrong_is_said_in_a_sentence(
  refusal, tmp_path, arguments, sentence
):
  given = [argument.format(folder=tmp_path) for argument in arguments]
  output = tmp_path / "out"
  told = refusal("kvjax.experiments.leaderboard", *given, f"--output={output}")
  assert sentence.format(folder=tmp_path) in told
  assert not output.exists()
