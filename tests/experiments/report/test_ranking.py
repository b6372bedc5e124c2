"""Runs side by side: what is comparable stands together, nothing else does."""

import csv
import io

import pytest

from kvjax.experiments.report import ranking


def lines_of(board):
  return list(csv.DictReader(io.StringIO(board.to_csv())))


@pytest.mark.parametrize(
  "settings",
  [
    {"model": "other"},
    {"weights": "other"},
    {"dtype": "bfloat16"},
    {"seed": 8},
    {"protocol": "query-aware"},
    {"schedule": "blocks of 128"},
    {"heads": "query head"},
    {"data": {"essay": "other"}},
    {"benchmark": "passkey"},
  ],
)
def test_other_settings_stand_apart(answer, record, tmp_path, settings):
  runs = [
    record([answer("full"), answer()], tmp_path / "a"),
    record([answer("full"), answer()], tmp_path / "b", **settings),
  ]
  board = ranking.merge(runs)
  assert [len(group.entries) for group in board.groups] == [2, 2]
  assert board.remarks == []


@pytest.mark.parametrize(
  "asked", [{"task": "vt"}, {"length": 512}, {"depth": 0.5}, {"turn": 0}]
)
def test_other_questions_stand_apart(answer, record, tmp_path, asked):
  runs = [
    record([answer()], tmp_path / "a"),
    record([answer(**asked)], tmp_path / "b"),
  ]
  assert len(ranking.merge(runs).groups) == 2


def test_the_best_of_several_draws_is_a_column(answer, record, tmp_path):
  drawn = [
    answer(score=score, draw=draw, first_draw="one", sample=draw)
    for draw, score in enumerate([100.0, 0.0])
  ]
  run = record(drawn, tmp_path / "a", benchmark="math500")
  board = ranking.merge([run])
  (line,) = lines_of(board)
  assert (line["score"], line["pass@2"]) == ("50.0", "100.0")
  assert "pass@2" in board.to_markdown(["plot.png"])


def test_the_newer_of_two_counts_and_keeps_its_own_delta(
  answer, record, age, tmp_path
):
  new = record(
    [answer("full", score=80.0), answer(score=60.0)], tmp_path / "new"
  )
  old = record(
    [
      answer("full", score=100.0),
      answer(score=50.0),
      answer("snapkv", score=40.0),
    ],
    tmp_path / "old",
  )
  age(old, 100)
  board = ranking.merge([new, old])
  (group,) = board.groups
  rows = [
    [line["method"], line["score"], line["delta"], line["run"]]
    for line in lines_of(board)
  ]
  assert sorted(rows) == [
    ["full", "80.0", "", str(new.folder)],
    ["keydiff", "60.0", "-20.0", str(new.folder)],
    ["snapkv", "40.0", "-60.0", str(old.folder)],
  ]
  (sentence,) = board.remarks
  assert sentence == (
    f"2 lines of {old.folder} gave way to those of {new.folder}, which is "
    "newer."
  )
  assert group.table.lines[0][0] == "full"
  text = board.to_markdown(list(board.plots()))
  for part in (
    "## ruler, 1024 tokens: tiny, query-agnostic, whole prompt, per kv head",
    "| snapkv | 25 % | 0.75 | 200 | 40.0 | 3.6–92.3 | −60.0 | 1 | 200 |",
    "Seed 7, greedy, float32 on CPU, 2 cores; python 3.12.1, jax 1.2.3.",
    "essay: texts of Python",
    sentence,
  ):
    assert part in text


def test_a_leaderboard_is_ranked_and_plotted(answer, record, tmp_path):
  half = {"retention": 0.5}
  runs = [
    record([answer("full"), answer("b", score=20.0)], tmp_path / "a"),
    record(
      [answer("a", score=60.0), answer("a", "0.5", 70.0, **half)],
      tmp_path / "b",
    ),
  ]
  board = ranking.merge(runs)
  (group,) = board.groups
  assert [line[0] for line in group.scores.lines] == ["full", "a", "b"]
  assert group.scores.header == ["method", "100 %", "50 %", "25 %"]
  assert [line[:2] for line in group.table.lines] == [
    ("full", "100 %"), ("a", "50 %"), ("a", "25 %"), ("b", "25 %")
  ]  # fmt: skip
  ((name, png),) = board.plots().items()
  assert png.startswith(b"\x89PNG")
  assert f"]({name})" in board.to_markdown([name])
  assert board.to_html([png]).count("data:image/png;base64,") == 1


def test_a_line_says_all_about_itself(answer, record, tmp_path):
  answers = [
    answer(task=task, sample=sample, score=score, read_tokens=100.0)
    for task in ("a", "b")
    for sample, score in enumerate((100.0, 0.0))
  ]
  (line,) = lines_of(ranking.merge([record(answers, tmp_path)]))
  low, high = float(line.pop("interval_low")), float(line.pop("interval_high"))
  assert 0 <= low < 50 < high <= 100
  assert line == {
    "dataset": "ruler",
    "length": "1024",
    "model": "tiny",
    "protocol": "query-agnostic",
    "schedule": "whole prompt",
    "heads": "kv head",
    "kv_dtype": "",
    "method": "keydiff",
    "options": "Keydiff()",
    "budget": "0.25",
    "retention": "0.25",
    "compression_ratio": "0.75",
    "context_tokens": "800.0",
    "kept_tokens": "200.0",
    "read_tokens": "100.0",
    "cache_bytes": "204800",
    "host_bytes": "0",
    "decoding_bytes": "",
    "answer_tokens": "",
    "prefill_seconds": "",
    "token_seconds": "",
    "score": "50.0",
    "delta": "",
    "samples": "4",
    "tasks": "a b",
    "weights": "abc123",
    "dtype": "float32",
    "seed": "7",
    "python": line["python"],
    "decoding": "greedy",
    "data": "essay: texts of Python",
    "device": "CPU, 2 cores",
    "versions": "python 3.12.1, jax 1.2.3",
    "run": str(tmp_path),
  }


def test_methods_of_one_name_are_told_apart_by_their_options(
  answer, record, tmp_path
):
  runs = [
    record([answer(options="KeyDiff(a=1)")], tmp_path / "a"),
    record([answer(options="KeyDiff(a=2)")], tmp_path / "b"),
  ]
  (group,) = ranking.merge(runs).groups
  assert {line[0] for line in group.table.lines} == {
    "KeyDiff(a=1)",
    "KeyDiff(a=2)",
  }


def test_scores_have_a_column_per_budget(answer, record, tmp_path):
  answers = [answer("full", score=100.0)]
  answers += [
    answer(method, budget=budget, retention=float(budget), score=score)
    for method, score in (("keydiff", 60.0), ("snapkv", 40.0))
    for budget in ("0.5", "0.25")
  ]
  (group,) = ranking.merge([record(answers, tmp_path / "a")]).groups
  assert group.scores.header == ["method", "100 %", "50 %", "25 %"]
  lines = [[cell.split(" ")[0] for cell in row] for row in group.scores.lines]
  assert lines == [
    ["full", "100.0", "", ""],
    ["keydiff", "", "60.0", "60.0"],
    ["snapkv", "", "40.0", "40.0"],
  ]


def test_scores_of_a_hybrid_say_which_layers_budgets_are_of(
  answer, record, tmp_path
):
  note = "Budgets are of the layers without a window."
  hybrid = record([answer(global_tokens=200.0)], tmp_path / "a")
  assert ranking.merge([hybrid]).to_markdown(["a.png"]).count(note) == 1
  assert note in ranking.merge([hybrid]).to_html([b""])
  plain = record([answer()], tmp_path / "b")
  assert note not in ranking.merge([plain]).to_markdown(["a.png"])
