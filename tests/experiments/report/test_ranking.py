"""Runs side by side: what is comparable stands together, nothing else does."""

import csv
import html
import io
import re

import pytest
import rich.console

from kvjax.experiments.report import ranking


def lines_of(board):
  return list(csv.DictReader(io.StringIO(board.to_csv())))


def on_terminal(board):
  console = rich.console.Console(width=80)
  with console.capture() as capture:
    console.print(board.to_terminal())
  return capture.get()


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
  assert group.table.lines[0][:2] == ["–", "full"]
  text = board.to_markdown(list(board.plots()))
  for part in (
    "## ruler, 1024 tokens: tiny, query-agnostic, whole prompt, per kv head",
    "Best of 2 methods: keydiff (25 %: 60.0); full cache 80.0.",
    "**± longer half of the 95 % interval, or (from–to)**",
    "| 2 | snapkv | 25 % | 200 | 40.0 | 3.6–92.3 | −60.0 | 1 | 200 |",
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
  assert [line[:2] for line in group.scores.lines] == [
    ["–", "full"], ["1", "a"], ["2", "b"]
  ]  # fmt: skip
  assert group.scores.header == ["rank", "method", "100 %", "50 %", "25 %"]
  assert [line[:3] for line in group.table.lines] == [
    ["–", "full", "100 %"],
    ["1", "a", "50 %"],
    ["1", "a", "25 %"],
    ["2", "b", "25 %"],
  ]
  assert {(line["rank"], line["method"]) for line in lines_of(board)} == {
    ("", "full"), ("1", "a"), ("2", "b")
  }  # fmt: skip
  ((name, png),) = board.plots().items()
  assert png.startswith(b"\x89PNG")
  assert f"]({name})" in board.to_markdown([name])
  assert board.to_html([png]).count("data:image/png;base64,") == 1


def test_a_headline_stands_above_each_table(answer, record, tmp_path):
  runs = [
    record(
      [answer("full"), answer("a<b", score=score), answer("c", score=50.0)],
      tmp_path / str(seed),
      seed=seed,
    )
    for seed, score in enumerate((60.0, 50.0))
  ]
  board = ranking.merge(runs)
  headlines = [
    "Best of 2 methods: a<b (25 %: 60.0); full cache 100.0.",
    "Best of 2 methods: a<b and c (25 %: 50.0); full cache 100.0.",
  ]
  page = html.unescape(board.to_html([b"", b""]))
  for text, table in (
    (on_terminal(board), " rank  method "),
    (board.to_markdown(["a.png", "b.png"]).replace("\\", ""), "| rank |"),
    (page, "<table"),
  ):
    before, first, second = re.split("Best of 2 ", text)
    assert table not in before
    for headline, part in zip(headlines, (first, second), strict=True):
      assert f"Best of 2 {part}".startswith(headline)
      assert table in part
  # Before all explanations.
  assert page.index(headlines[0]) < page.index("</table>") < page.index("<i>")
  ranks = [[line[0] for line in group.scores.lines] for group in board.groups]
  assert ranks == [["–", "1", "2"], ["–", "1", "1"]]


def test_a_terminal_names_and_ranks_a_method_once(answer, record, tmp_path):
  long = "protokv:score=attn_mean:prototypes=60"
  answers = [answer("full")]
  answers += [
    answer(method, budget, score, retention=float(budget))
    for method, score in (("a:b=1", 60.0), (long, 40.0))
    for budget in ("0.5", "0.25")
  ]
  board = ranking.merge([record(answers, tmp_path)])
  text = on_terminal(board)
  table = text[text.index(" rank ") :]
  assert max(map(len, table.splitlines())) <= 80
  lines = [line.split()[:4] for line in table.splitlines()]
  assert ["1", "a:b=1", "50", "%"] in lines
  assert [line[:2] for line in lines].count(["25", "%"]) == 2
  assert table.count("a:b=1") == 1
  assert [line[0] for line in lines if line and line[0] in "–12"] == [
    *("–", "1", "2")
  ]


def test_the_html_tells_names_from_ranks(answer, record, tmp_path):
  board = ranking.merge([record([answer("full"), answer()], tmp_path)])
  cells = re.findall(
    r'<tr( class="full")?><td>(.)</td><td class="name">(\w+)</td>',
    board.to_html([b""]),
  )
  # By budget, and every number.
  assert cells == 2 * [(' class="full"', "–", "full"), ("", "1", "keydiff")]


def test_a_line_says_all_about_itself(answer, record, tmp_path):
  answers = [
    answer(task=task, sample=sample, score=score, read_tokens=100.0)
    for task in ("a", "b")
    for sample, score in enumerate((100.0, 0.0))
  ]
  (line,) = lines_of(ranking.merge([record(answers, tmp_path)]))
  low, high = float(line.pop("interval_low")), float(line.pop("interval_high"))
  assert 0 <= low < 50 < high <= 100
  assert next(iter(line)) == "rank"
  assert line == {
    "rank": "1",
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
  one, two = ({"options": f"KeyDiff(a={number})"} for number in (1, 2))
  half = answer(budget="0.5", retention=0.5, score=90.0, **one)
  runs = [
    # A budget of one of them alone makes no third method.
    record([half, answer(score=40.0, **one)], tmp_path / "a"),
    record([answer(score=60.0, **two)], tmp_path / "b"),
  ]
  board = ranking.merge(runs)
  (group,) = board.groups
  assert [line[:3] for line in group.table.lines] == [
    ["1", "KeyDiff(a=2)", "25 %"],
    ["2", "KeyDiff(a=1)", "50 %"],
    ["2", "KeyDiff(a=1)", "25 %"],
  ]
  assert sorted(
    (line["rank"], line["method"], line["options"]) for line in lines_of(board)
  ) == [
    ("1", "keydiff", "KeyDiff(a=2)"),
    ("2", "keydiff", "KeyDiff(a=1)"),
    ("2", "keydiff", "KeyDiff(a=1)"),
  ]


def test_scores_have_a_column_per_budget(answer, record, tmp_path):
  answers = [answer("full", score=100.0)]
  answers += [
    answer(method, budget=budget, retention=float(budget), score=score)
    for method, score in (("keydiff", 60.0), ("snapkv", 40.0))
    for budget in ("0.5", "0.25")
  ]
  (group,) = ranking.merge([record(answers, tmp_path / "a")]).groups
  assert group.scores.header == ["rank", "method", "100 %", "50 %", "25 %"]
  lines = [[cell.split(" ")[0] for cell in row] for row in group.scores.lines]
  assert lines == [
    ["–", "full", "100.0", "", ""],
    ["1", "keydiff", "", "60.0", "60.0"],
    ["2", "snapkv", "", "40.0", "40.0"],
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
