"""Comparison of our numbers with the paper's: averages, tables, orders."""

import dataclasses

import pytest
from made_runs import make_answer

from kvjax.experiments.papers import compare_to_paper, paper_tables, running
from kvjax.experiments.papers.data_model import Average, Key, Size
from kvjax.experiments.papers.registry import EXPERIMENTS

SCORES = {"trec": 80.0, "lsht": 40.0, "lcc": 10.0}


def answers_of(candidates, scores, lengths=(7500,), samples=1, less=1.0):
  """What every candidate answers, each so much worse than the one before."""
  return [
    make_answer(
      candidate.method,
      candidate.budget,
      task=task,
      length=length,
      sample=sample,
      asked=f"{task} {sample}",
      options=candidate.options,
      scores={
        "score": max(0.0, score - less * number - (length == 288)),
        "partial": 5.0,
      },
    )
    for number, candidate in enumerate(candidates)
    for task, score in scores.items()
    for length in lengths
    for sample in range(samples)
  ]


@pytest.fixture
def cells(invented):
  return running.cells_of(invented, "paper", invented.at("paper"))


@pytest.fixture
def found(invented):
  """At either scale, given what the first candidate scores."""

  def make(scale, scores, lengths=(7500,), **more):
    cells = running.cells_of(invented, scale, invented.at(scale))
    answers = answers_of(running.chosen(cells), scores, lengths, **more)
    return compare_to_paper.compare_to_paper(invented, scale, cells, answers)

  return make


def test_an_average_is_the_mean_of_its_groups_means(found):
  ours = found("paper", SCORES).ours
  # (80 + 40) / 2 = 60 and 10.
  assert ours[Key("Full", "short", "of two kinds")].score == 35.0
  assert ours[Key("Full", "longer", "code")].score == 10.0
  assert ours[Key("Sinks", "long", "lsht")].score == 39.0
  # Sinks at 1,024 tokens, and Ours, whose budget no column changes.
  assert ours[Key("Sinks", "longer", "trec")].score == 78.0
  assert ours[Key("Ours", "longer", "trec")].score == 77.0
  assert ours[Key("Ours", "short", "trec")].score == 77.0


def test_every_number_has_its_interval_and_samples(found):
  ours = found("paper", SCORES, samples=4).ours
  number = ours[Key("Full", "short", "of two kinds")]
  assert number.samples == 12
  assert number.interval[0] < 35 < number.interval[1]
  assert ours[Key("Full", "short", "lsht")].samples == 4


def test_weights_are_those_of_the_mean_of_groups():
  average = Average("a", (("trec", "lsht"), ("lcc",)))
  assert average.weights == {"trec": 0.25, "lsht": 0.25, "lcc": 0.5}
  assert average.mean(SCORES) == 35.0
  assert average.over(["lsht"]).weights == {"lsht": 1.0}


def test_other_scores_are_averaged_alike(invented, cells):
  answers = answers_of(running.chosen(cells), SCORES)
  one = dataclasses.replace(
    invented, averages=(Average("p", (("trec",),), "partial"),)
  )
  found = compare_to_paper.compare_to_paper(one, "paper", cells, answers)
  assert found.ours[Key("Full", "short", "p")].score == 5.0


def test_averages_of_scores_that_older_answers_lack_are_left_out(
  invented, cells
):
  answers = answers_of(running.chosen(cells), SCORES)
  averages = (
    Average("new", (("trec",),), "first_key_token"),
    Average("p", (("trec",),), "partial"),
  )
  comparison = dataclasses.replace(invented, averages=averages)
  found = compare_to_paper.compare_to_paper(comparison, "paper", cells, answers)
  assert list(found.averages) == ["p"]
  answers = [
    dataclasses.replace(a, scores={"score": 0.0, "first_key_token": 1.0})
    for a in answers
  ]
  found = compare_to_paper.compare_to_paper(comparison, "paper", cells, answers)
  assert list(found.averages) == ["new"]


def test_missing_tasks_are_left_out_and_said(found):
  two = found("paper", {"trec": 80.0, "lcc": 10.0})
  assert two.ours[Key("Full", "short", "of two kinds")].score == 45.0
  titles = [table.title for table in paper_tables.tables(two)]
  assert titles[0] == "Invented: of two kinds (ours: 2 of 3 tasks)"
  assert titles[1] == "Invented: code"


def test_what_stands_in_goes_beside_the_headline_alone(found):
  scores = {"niah_single_1": 90.0, "niah_single_2": 70.0}
  small = found("small", scores, lengths=(256, 288))
  (table,) = paper_tables.tables(small)
  assert table.title == (
    "Invented: of two kinds (ours: mean of niah_single_1, niah_single_2)"
  )
  assert table.header == ["method", "at", "here", "ours", "n", "A model"]
  lines = [
    (*names, ours.partition(" ")[0], number, model)
    for *names, ours, number, model in table.lines
  ]
  assert lines == [
    # A column that is a length has the answers of that length.
    ("Full", "short", "100 %", "80.0", "2", "50"),
    ("Full", "long", "100 %", "79.0", "2", "50"),
    ("Sinks", "short", "50 %", "79.0", "2", "12.25"),
    ("Sinks", "long", "25 %", "77.0", "2", "–"),
    ("Ours", "short", "40 tokens", "77.0", "2", "49"),
    ("Ours", "long", "40 tokens", "76.0", "2", "–"),
    ("Ours", "longer", "–", "–", "–", "49.5"),
    ("Other", "short", "–", "–", "–", "3?"),
  ]
  # The Wilson interval of two trials.
  assert table.lines[0][3] == "80.0 ±58"


def test_lines_that_are_the_same_in_all_columns_stand_once(found):
  table = paper_tables.tables(found("paper", SCORES))[1]
  assert [(*line[:2], line[2].partition(" ")[0]) for line in table.lines] == [
    ("Full", "all", "10.0"),
    ("Sinks", "short", "9.0"),
    ("Sinks", "long", "9.0"),
    ("Sinks", "longer", "8.0"),
    ("Ours", "all", "7.0"),
  ]


def test_tasks_that_the_paper_prints_have_a_table_of_their_own(found):
  table = paper_tables.tables(found("paper", SCORES))[2]
  assert table.title == "Invented: Ours by task"
  assert table.header == ["task", "at", "ours", "n", "A model"]
  ((task, column, ours, number, paper),) = table.lines
  assert (task, column, number, paper) == ("lcc", "short", "1", "7")
  assert ours.startswith("7.0 ")


def test_scores_may_be_sorted_by_a_size(invented, cells):
  answers = answers_of(running.chosen(cells), SCORES)
  size = Size("kept", lambda candidate: candidate.plan.budget.num_kept(9999))
  sized = dataclasses.replace(invented, size=size)
  found = compare_to_paper.compare_to_paper(sized, "paper", cells, answers)
  table = paper_tables.tables(found)[2]
  assert table.header == ["kept", "method", "at", "ours", "n", "A model"]
  assert [line[0] for line in table.lines] == sorted(
    (line[0] for line in table.lines), key=int
  )
  assert table.lines[0][:2] == ["64", "Ours"]


def test_a_lag_keeps_its_share():
  experiment = EXPERIMENTS["E5.3"].parts[0]
  cells = running.cells_of(experiment, "paper", experiment.paper)
  sizes = {
    (line.name, column.name): experiment.size.of(candidate)
    for (line, column), candidate in cells.items()
  }
  assert sizes["L = 1024", "8x"] == 128
  assert sizes["L = 128", "6x"] == 21
  assert sizes["Full", "2x"] is None


def test_orders_name_what_both_have_and_doubt_nobody(found):
  first, *more = compare_to_paper.orders(
    found("paper", SCORES, samples=80, less=25.0)
  )
  # Only where the paper has two numbers beside the full cache's.
  assert first == "Order at short: ours Sinks > Ours; A model Ours > Sinks."
  assert not any(line.startswith("Order at") for line in more)


@pytest.mark.parametrize("less", [0.0, 1.0, 20.0])
def test_what_samples_do_not_decide_between_neighbors_is_said(found, less):
  """One sample per task, whatever it says."""
  scores = {"niah_single_1": 90.0, "niah_single_2": 70.0}
  small = found("small", scores, (256, 288), less=less)
  assert compare_to_paper.orders(small) == [
    "At short, long no method differs from the next in rank by more than "
    "chance; others are not compared."
  ]


def test_an_order_says_what_is_equal():
  order = compare_to_paper._printed_order
  assert order({"a": 1.0, "b": 3.0, "c": 1.0}) == "b > a = c"


def test_data_has_every_number(found):
  data = compare_to_paper.as_data(
    found("small", {"niah_single_1": 9.0}, (256, 288))
  )
  cells = {(d["line"], d["column"], d["what"]): d for d in data}
  assert len(cells) == len(data)
  one = cells["Sinks", "short", "of two kinds"]
  assert (one["ours"], one["paper"]) == (8.0, {"A model": 12.25})
  assert one["samples"] == 1
  assert one["interval"][0] < 8 < one["interval"][1]
  other = cells["Ours", "longer", "of two kinds"]
  assert (other["ours"], other["here"], other["samples"]) == (None, None, 0)
