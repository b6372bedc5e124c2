"""The experiments as data: all there, runnable, as the papers print them."""

import json
import pathlib
import re

import pytest

import kvjax
from kvjax.experiments.benchmarks.longbench import sets
from kvjax.experiments.benchmarks.registry import BENCHMARKS
from kvjax.experiments.benchmarks.ruler import generator
from kvjax.experiments.papers import printed, registry, running
from kvjax.experiments.papers.data_model import Comparison
from kvjax.experiments.papers.registry import EXPERIMENTS

IDS = [
  f"E{paper}.{number}"
  for paper, last in ((1, 9), (2, 14), (3, 9), (4, 11), (5, 5))
  for number in range(1, last + 1)
]
COMPARISONS = {
  f"{experiment.id} {part.name}": part
  for experiment in EXPERIMENTS.values()
  for part in experiment.parts
  if isinstance(part, Comparison)
}
REFERENCE = pathlib.Path(kvjax.models.__file__).parent / "reference"
TASKS = {*generator.TASKS, *sets.SETS, "needle", "passkey"}
TASKS |= {"math500", "arithmetic"}
TASKS.add("niah_multiturn_conversation")


def test_every_experiment_of_the_papers_is_there():
  assert list(EXPERIMENTS) == IDS
  for experiment in EXPERIMENTS.values():
    assert bool(experiment.parts) != bool(experiment.why_not)
    if experiment.parts:
      assert experiment.minutes > 0
      assert experiment.instead
  assert set(registry._PARTS) <= set(EXPERIMENTS)


@pytest.mark.parametrize("name", COMPARISONS)
def test_methods_tasks_and_budgets_exist_at_both_scales(name):
  part = COMPARISONS[name]
  for scale in ("paper", "small"):
    setup = part.at(scale)
    if setup is None:
      continue
    assert set(setup.tasks) <= TASKS
    assert setup.benchmark in BENCHMARKS
    cells = running.cells_of(part, scale, setup)
    columns = [column for column in part.columns if column.at(scale)]
    lines = [line for line in part.lines if line.at(scale)]
    found = [cell for cell in cells.values() if cell is not None]
    assert len(found) == len(lines) * len(columns) > 0
    for column in columns:
      assert column.at(scale).length in (None, *setup.lengths)
    # What a line means must not depend on the scale.
    for line in lines:
      before = line.paper.method.partition(":")[0].partition(".")[0]
      assert line.at(scale).method.startswith(before)
  assert {task for a in part.averages for task in a.tasks} <= TASKS


@pytest.mark.parametrize("name", COMPARISONS)
def test_numbers_belong_to_lines_columns_and_tasks_that_there_are(name):
  part = COMPARISONS[name]
  lines = {line.name for line in part.lines} | set(part.quoted)
  columns = {column.name for column in part.columns}
  whats = {average.name for average in part.averages} | set(part.paper.tasks)
  for targets in part.targets:
    assert targets.numbers
    assert set(targets.doubts) <= lines
    for key, number in targets.numbers.items():
      assert key.line in lines
      assert key.column in columns
      assert key.what in whats
      assert 0 <= number <= 100


def test_code_has_both_scores_wherever_it_is_asked():
  """LongBench's code uses either library, and no paper says which."""
  asked = {
    name: part
    for name, part in COMPARISONS.items()
    if {"lcc", "repobench-p"} <= set(part.paper.tasks)
  }
  assert len(asked) == 13
  for part in asked.values():
    scores = {
      average.score
      for average in part.averages
      if set(average.tasks) == {"lcc", "repobench-p"}
    }
    assert scores == {"score", "difflib"}
    # A stand-in without code is averaged by the headline.
    assert part.averages[0].score == "score"


def test_every_file_of_numbers_belongs_to_a_comparison():
  files = pathlib.Path(printed.__file__).parent.glob("tables/*.tsv")
  read = [printed.read(file.stem) for file in files]
  used = [part.targets for part in COMPARISONS.values() if part.targets]
  assert len(read) > 20
  assert all(targets in used for targets in read)
  assert all(targets in read for targets in used)


def _printed(part):
  """Every average that is printed, with its place and the model's numbers."""
  for targets in part.targets:
    for average in part.averages:
      for line, column, what in targets.numbers:
        if what == average.name:
          own = {
            key.what: number
            for key, number in targets.numbers.items()
            if key[:2] == (line, column)
          }
          yield (targets.model, line, column, what), average, own


# Printed to one decimal; else to two.
COARSE = {"E5.1 RULER": 0.1}


def test_averages_follow_from_the_tasks_that_are_printed():
  checked = {}
  for name, part in COMPARISONS.items():
    for place, average, own in _printed(part):
      if set(average.tasks) <= set(own):
        # The tasks are rounded too.
        bound = COARSE.get(name, 0.01)
        assert average.mean(own) == pytest.approx(
          own[average.name], abs=bound
        ), (name, *place)
        checked[name] = checked.get(name, 0) + 1
  assert checked == {
    "E1.4 single tokens": 2,
    "E2.1 blocks of 128": 152,
    "E2.2 no blocks": 44,
    "E2.3 blocks of 256": 24,
    "E2.3 blocks of 64": 24,
    "E2.4 variants": 24,
    "E4.1 RULER": 3,
    "E4.2 LongBench": 12,
    "E4.7 sweeps": 12,
    "E5.1 RULER": 32,
  }


# Averages that do not follow from the categories beside them, and by how much.
MISPRINTS = {("Qwen2.5-14B-1M", "Compactor", "50 %", "mean of 14"): 0.28}


@pytest.mark.parametrize(
  ("name", "bound", "count"),
  [("E3.3 LongBench", 0.1, 16), ("E5.2 LongBench", 0.01, 32)],
)
def test_averages_follow_from_the_categories_that_are_printed(
  name, bound, count
):
  part = COMPARISONS[name]
  headline, *categories = part.averages
  categories = [
    category
    for category in categories
    if set(category.tasks) <= set(headline.tasks)
    and category.score == headline.score
  ]
  assert {t for c in categories for t in c.tasks} == set(headline.tasks)
  checked = 0
  for place, average, own in _printed(part):
    if average == headline and {c.name for c in categories} <= set(own):
      total = sum(len(c.tasks) * own[c.name] for c in categories)
      off = total / len(headline.tasks) - own[headline.name]
      assert off == pytest.approx(MISPRINTS.get(place, 0), abs=bound), place
      checked += 1
  assert checked == count


def test_the_rows_that_print_their_mean_first_are_put_right():
  """The paper prints 73.34 and 81.55 before the five lengths."""
  (targets,) = COMPARISONS["E4.9 RULER"].targets
  for line, mean in (("(10,150)", 73.34), ("(9,120)", 81.55)):
    own = [n for key, n in targets.numbers.items() if line in key.line]
    assert sum(own) / 5 == pytest.approx(mean, abs=0.01)


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_ablations_sketch_to_half_the_dimensions_of_a_head(scale):
  """With as many columns as dimensions, all sketches would be exact."""
  config = json.loads((REFERENCE / "config.json").read_text())
  dimensions = {"paper": 128, "small": config["head_dim"]}[scale]
  ways = [line.at(scale) for line in COMPARISONS["E3.4 ablations"].lines]
  methods = [kvjax.get_method(way.method) for way in ways]
  sketched = [
    m.sketch_dim for m in methods if getattr(m, "sketch", "none") != "none"
  ]
  assert len(sketched) == 8
  assert {*sketched} == {dimensions // 2}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_tables_of_all_numbers_are_named_or_unknown(name):
  for place in printed.places(name):
    assert re.fullmatch(r"Table \d+|unknown", place)
