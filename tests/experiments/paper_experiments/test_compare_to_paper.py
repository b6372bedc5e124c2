"""Comparison of our numbers with the paper's: averages, tables, orders."""

import dataclasses

import pytest

from kvjax.experiments.paper_experiments import compare_to_paper, running
from kvjax.experiments.paper_experiments.records import Average, Key

SCORES = {"trec": 80.0, "lsht": 40.0, "lcc": 10.0}


def rows_of(candidates, scores, lengths=(7500,)):
  """What every candidate answers, each a point worse than the one before."""
  return [
    {
      "method": candidate.method,
      "budget": candidate.budget,
      "task": task,
      "length": length,
      "turn": None,
      "score": score - number - (length == 288),
      "scores": {"partial": 5.0},
      "samples": 1,
    }
    for number, candidate in enumerate(candidates)
    for task, score in scores.items()
    for length in lengths
  ]


@pytest.fixture
def found(invented):
  """At either scale, given what the first candidate scores."""

  def make(scale, scores, lengths=(7500,)):
    cells = running.cells_of(invented, scale, invented.setup(scale))
    rows = rows_of(running.chosen(cells), scores, lengths)
    return compare_to_paper.compare_to_paper(invented, scale, cells, rows)

  return make


def test_an_average_is_the_mean_of_its_groups_means(found):
  ours = found("paper", SCORES).ours
  # (80 + 40) / 2 = 60 and 10.
  assert ours[Key("Full", "short", "of two kinds")] == 35.0
  assert ours[Key("Full", "longer", "code")] == 10.0
  assert ours[Key("Sinks", "long", "lsht")] == 39.0
  # Sinks at 1,024 tokens, and Ours, whose budget no column changes.
  assert ours[Key("Sinks", "longer", "trec")] == 78.0
  assert ours[Key("Ours", "longer", "trec")] == 77.0
  assert ours[Key("Ours", "short", "trec")] == 77.0


def test_other_scores_are_averaged_alike(invented):
  rows = rows_of(
    running.chosen(
      running.cells_of(invented, "paper", invented.setup("paper"))
    )[:1],
    SCORES,
  )
  assert (
    compare_to_paper.mean(Average("p", (("trec",),), "partial"), rows) == 5.0
  )


def test_averages_of_scores_that_older_answers_lack_are_left_out(invented):
  cells = running.cells_of(invented, "paper", invented.setup("paper"))
  rows = rows_of(running.chosen(cells), SCORES)
  averages = (
    Average("new", (("trec",),), "first_key_token"),
    Average("p", (("trec",),), "partial"),
  )
  comparison = dataclasses.replace(invented, averages=averages)
  found = compare_to_paper.compare_to_paper(comparison, "paper", cells, rows)
  assert list(found.averages) == ["p"]
  rows = [row | {"scores": {"first_key_token": 1.0}} for row in rows]
  found = compare_to_paper.compare_to_paper(comparison, "paper", cells, rows)
  assert list(found.averages) == ["new"]


def test_missing_tasks_are_left_out_and_said(found):
  two = found("paper", {"trec": 80.0, "lcc": 10.0})
  assert two.ours[Key("Full", "short", "of two kinds")] == 45.0
  titles = [table.title for table in compare_to_paper.tables(two)]
  assert titles[0] == "Invented: of two kinds (ours: 2 of 3 tasks)"
  assert titles[1] == "Invented: code"


def test_what_stands_in_goes_beside_the_headline_alone(found):
  scores = {"niah_single_1": 90.0, "niah_single_2": 70.0}
  small = found("small", scores, lengths=(256, 288))
  (table,) = compare_to_paper.tables(small)
  assert table.title == (
    "Invented: of two kinds (ours: mean of niah_single_1, niah_single_2)"
  )
  assert table.header == ["method", "at", "here", "ours", "A model"]
  assert [tuple(line) for line in table.lines] == [
    # A column that is a length has the rows of that length.
    ("Full", "short", "100 %", "80.0", "50"),
    ("Full", "long", "100 %", "79.0", "50"),
    ("Sinks", "short", "50 %", "79.0", "12.25"),
    ("Sinks", "long", "25 %", "77.0", "–"),
    ("Ours", "short", "40 tokens", "77.0", "49"),
    ("Ours", "long", "40 tokens", "76.0", "–"),
    ("Ours", "longer", "–", "–", "49.5"),
    ("Other", "short", "–", "–", "3?"),
  ]


def test_lines_that_are_the_same_in_all_columns_stand_once(found):
  table = compare_to_paper.tables(found("paper", SCORES))[1]
  assert [tuple(line) for line in table.lines] == [
    ("Full", "all", "10.0", "–"),
    ("Sinks", "short", "9.0", "–"),
    ("Sinks", "long", "9.0", "–"),
    ("Sinks", "longer", "8.0", "–"),
    ("Ours", "all", "7.0", "–"),
  ]


def test_tasks_that_the_paper_prints_have_a_table_of_their_own(found):
  table = compare_to_paper.tables(found("paper", SCORES))[2]
  assert table.title == "Invented: Ours by task"
  assert table.header == ["task", "at", "ours", "A model"]
  assert list(table.lines) == [("lcc", "short", "7.0", "7")]


def test_orders_name_what_both_have_and_doubt_nobody(found):
  lines = compare_to_paper.orders(found("paper", SCORES))
  # Only where the paper has two numbers beside the full cache's.
  assert lines == ["Order at short: ours Sinks > Ours; A model Ours > Sinks."]


def test_equal_scores_are_no_order(found):
  flat = {"niah_single_1": 0.0}
  small = found("small", flat, (256, 288))
  equal = small._replace(ours=dict.fromkeys(small.ours, 0.0))
  assert compare_to_paper.orders(equal) == [
    "At short, long all methods score 0.0 here, which tells nothing about "
    "their order."
  ]


def test_an_order_says_what_is_equal():
  assert compare_to_paper.order({"a": 1.0, "b": 3.0, "c": 1.02}) == "b > c = a"


def test_data_has_every_number(found):
  data = compare_to_paper.as_data(
    found("small", {"niah_single_1": 9.0}, (256, 288))
  )
  cells = {(d["line"], d["column"], d["what"]): d for d in data}
  assert len(cells) == len(data)
  one = cells["Sinks", "short", "of two kinds"]
  assert (one["ours"], one["paper"]) == (8.0, {"A model": 12.25})
  other = cells["Ours", "longer", "of two kinds"]
  assert (other["ours"], other["here"]) == (None, None)
