"""The binary: a leaderboard of runs, and one sentence for what is wrong."""

import pytest
from made_runs import make_answer, make_record


def test_runs_become_one_leaderboard(run_binary, tmp_path):
  answers = [make_answer("full", task="vt", length=512)]
  make_record(answers, tmp_path / "runs" / "a")
  make_record(answers, tmp_path / "runs" / "b", protocol="query-aware")
  make_record(answers, tmp_path / "runs" / "c")
  (tmp_path / "runs" / "c" / "summary.json").unlink()
  output, kvpress = tmp_path / "new" / "board", tmp_path / "kvpress"
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
  assert {path.name for path in kvpress.iterdir()} == {
    "kvjax_ruler__512__tiny__no_press__0.00",
    "kvjax_ruler__512__tiny__no_press__0.00__whole_prompt",
  }
  assert all(len(list(path.iterdir())) == 3 for path in kvpress.iterdir())


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    ([], "Name the folders that hold runs, as in kvjax leaderboard results."),
    (["{folder}"], "{folder} holds no run"),
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
