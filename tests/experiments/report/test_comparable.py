"""Scores over other tasks, lengths or samples never stand side by side."""

import csv
import io
import statistics

import pytest

from kvjax.experiments.benchmarks.base import Presentation
from kvjax.experiments.report import (
  compared,
  ranking,
  run_tables,
  series,
  wording,
)
from kvjax.experiments.report.means import complete, means, ranks
from kvjax.experiments.report.tables import by_budget, by_task, overview, tables

# Of the full cache: what a method with fewer of them is not measured by.
FULL = {"niah_single_1": 100.0, "vt": 0.0}


@pytest.fixture
def short_of_a_task(answer):
  """The full cache has two tasks of two samples; keydiff only the easy one."""
  full = [
    answer("full", task=task, score=score, sample=sample)
    for task, score in FULL.items()
    for sample in (0, 1)
  ]
  easy = [
    answer(budget="0.5", retention=0.5, sample=number) for number in (0, 1)
  ]
  return [*full, *easy]


def by_method(table, *columns):
  places = [table.header.index(column) for column in columns]
  named = table.header.index("method")
  return {line[named]: [line[at] for at in places] for line in table.lines}


def test_a_mean_over_fewer_tasks_is_a_dash_in_every_table(
  short_of_a_task, record
):
  found = record(short_of_a_task)
  full = f"{statistics.fmean(FULL.values()):.1f}"
  assert full == "50.0"
  assert by_method(by_task(found), "single_1", "vt", "mean", "Δ full") == {
    "full": ["100.0", "0.0", full, "–"],
    "keydiff": ["100.0", "–", "–", "–"],
  }
  averages = means(found.summary["rows"], found.answers)
  every = overview(averages, "", Presentation())
  assert by_method(every, "score", "Δ full", "n") == {
    "full": [full, "–", "4"],
    "keydiff": ["–", "–", "2"],
  }
  assert by_method(every, "95 %")["keydiff"] == ["–"]
  assert "Best" not in run_tables.markdown(found, [])
  assert wording.headline(means(found.summary["rows"])) == ""


def test_sets_that_a_method_lacks_make_its_averages_dashes(answer, record):
  scores = {"qasper": 10.0, "hotpotqa": 30.0}
  answers = [answer("full", task=task, score=of) for task, of in scores.items()]
  answers += [answer(task="qasper", score=10.0)]
  (table,) = (
    table
    for table in tables(record(answers, benchmark="longbench"))
    if table.title.startswith("sets at")
  )
  cells = {line[0]: line[1:] for line in table.lines}
  assert cells["qasper"] == ["10.0", "10.0"]
  assert cells["all 2 sets"] == ["20.0", "–"]
  assert cells["Δ full"] == ["–", "–"]
  averages = [of for name, of in cells.items() if "English" in name]
  assert averages
  assert all(of[0] != "–" == of[1] for of in averages)


def test_a_leaderboard_ranks_and_lists_what_a_method_answered(
  short_of_a_task, record, tmp_path
):
  board = ranking.merge([record(short_of_a_task, tmp_path)])
  (group,) = board.groups
  assert group.headline == ""
  lines = {
    line["method"]: [line[name] for name in ("rank", "tasks", "delta")]
    for line in csv.DictReader(io.StringIO(board.to_csv()))
  }
  assert lines == {
    "full": ["", "niah_single_1 vt", ""],
    "keydiff": ["", "niah_single_1", ""],
  }


def test_a_headline_counts_the_methods_that_can_be_compared(
  short_of_a_task, answer, record
):
  whole = [
    answer("snapkv", task=task, score=score, sample=sample)
    for task, score in (("niah_single_1", 60.0), ("vt", 20.0))
    for sample in (0, 1)
  ]
  found = means(record([*short_of_a_task, *whole]).summary["rows"])
  assert wording.headline(found) == "snapkv (25 %: 40.0); full cache 50.0."
  assert ranks(found) == {"snapkv": 1}


def test_a_difference_is_over_the_same_samples_or_unknown(answer, record):
  full = [
    answer("full", sample=number, score=score)
    for number, score in enumerate((0.0, 0.0, 100.0, 100.0, 100.0))
  ]
  first_two = [answer(sample=number, score=0.0) for number in (0, 1)]
  every = [answer("snapkv", sample=number, score=40.0) for number in range(5)]
  found = record([*full, *first_two, *every])
  deltas = {mean.method: mean.delta for mean in means(found.summary["rows"])}
  paired = [
    its.score - whole.score for its, whole in zip(every, full, strict=True)
  ]
  assert deltas == {
    "full": None,
    "keydiff": None,
    "snapkv": pytest.approx(statistics.fmean(paired)),
  }


@pytest.mark.parametrize(
  "others",
  [{"task": "vt"}, {"length": 600}, {"depth": 0.5}, {"turn": 1}],
  ids=lambda others: next(iter(others)),
)
def test_as_many_other_places_are_no_places_in_common(answer, record, others):
  """One place each; the second method and the full cache share theirs."""
  answers = [
    answer("snapkv", score=100.0, **others),
    *(answer(method, score=50.0) for method in ("keydiff", "full")),
  ]
  found = means(record(answers).summary["rows"])
  assert [mean.method for mean in complete(found)] == ["full", "keydiff"]
  assert ranks(found) == {"keydiff": 1}


def test_the_samples_of_a_grid_are_those_of_its_scores(
  short_of_a_task, answer, record
):
  whole = [
    answer("snapkv", task=task, sample=sample)
    for task in FULL
    for sample in (0, 1, 2)
  ]
  # Four of the full cache and six of snapkv, but two of what is a dash.
  table = by_budget(record([*short_of_a_task, *whole]))
  assert ", n = 4;" in table.title
  assert by_method(table, "50 %")["keydiff"] == ["–"]


def test_other_lengths_of_a_comparison_have_their_own_tables(answer, record):
  scores = {
    900: {"full": 100.0, "keydiff": 80.0},
    256: {"full": 60.0, "snapkv": 30.0},
  }
  found = record(
    [
      answer(method, score=score, length=length, context_tokens=length)
      for length, of in scores.items()
      for method, score in of.items()
    ],
    benchmark="needles",
  )
  text = compared.markdown(found)
  blocks = text.split("\n\n")
  for length, of in scores.items():
    (title,) = (
      place
      for place, block in enumerate(blocks)
      if block.startswith(f"**{length} tokens: score by task, n = 1;")
    )
    _, _, *lines = blocks[title + 1].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    # Method, the one task, the mean, and the tokens that are kept.
    assert [[x[0], *x[2:5]] for x in cells] == [
      [method, *[f"{score:.1f}"] * 2, f"{length * share:.0f}"]
      for (method, score), share in zip(of.items(), (1, 0.25), strict=True)
    ]
  assert "keydiff (" not in text
  one = compared.markdown(found.at(length=900))
  assert "tokens: score by task" not in one


def test_needles_at_other_depths_are_not_ranked(answer, record, tmp_path):
  def needles(method, length, depths, score):
    return [
      answer(method, length=length, depth=depth, score=score, sample=number)
      for number, depth in enumerate(depths)
    ]

  found = record(
    [
      *needles("keydiff", 300, (0.0, 0.25, 0.5, 1.0), 50.0),
      *needles("snapkv", 600, (0.0, 0.5, 1.0), 100.0),
    ],
    tmp_path,
    benchmark="needle",
  )
  board = ranking.merge([found])
  lines = list(csv.DictReader(io.StringIO(board.to_csv())))
  assert [(x["method"], x["rank"], x["length"]) for x in lines] == [
    ("keydiff", "1", "300"),
    ("snapkv", "", "600"),
  ]
  (group,) = board.groups
  assert group.headline == "keydiff (25 %: 50.0)."
  assert by_method(group.scores, "25 %")["snapkv"] == ["–"]


def test_columns_of_other_tasks_are_dashes(answer, record):
  """By length, and of all scores."""
  answers = [
    answer(
      method, task=task, length=length, scores={"score": score, "partial": 60.0}
    )
    for method, tasks in (("full", "ab"), ("keydiff", "a"))
    for task, score in zip(tasks, (100.0, 0.0), strict=False)
    for length in (512, 1024)
  ]
  found = record(answers)
  by_length = series.by_length(found)[0]
  assert by_method(by_length, "512", "1024", "mean") == {
    "full": ["50.0", "50.0", "50.0"],
    "keydiff": ["–", "–", "–"],
  }
  (every,) = series.other_scores(found)
  assert by_method(every, "score", "partial") == {
    "full": ["50.0", "60.0"],
    "keydiff": ["–", "–"],
  }
