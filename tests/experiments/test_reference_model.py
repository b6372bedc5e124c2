"""What the bundled model must be able to do for the demo to mean something."""

import pathlib

import numpy as np
import pytest
from comparing import compare

import kvjax
from kvjax import models
from kvjax.experiments.reference.validation import depth_grid, rounds, validate
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.results import Part, Results, Settings
from kvjax.experiments.run.summaries import summarize
from kvjax.experiments.tasks import suite


@pytest.fixture(scope="module")
def bundled():
  directory = pathlib.Path(models.__file__).parent / "reference"
  return models.load(directory, "float32")


@pytest.mark.slow
def test_it_answers_with_its_full_cache(bundled):
  tasks = ("niah_single_2", "niah_multikey_2", "niah_multikey_3", "passkey")
  scores = list(validate(bundled, 4, 1, (1024,), tasks))
  assert min(score.contained for score in scores) >= 0.75, scores
  assert np.mean([score.contained for score in scores]) >= 0.9, scores


@pytest.mark.slow
def test_it_shows_methods_falling_apart(bundled, tmp_path):
  """What the demo is for: a good model, a bad method and a good one."""
  chosen = (
    *candidates(["random"], [kvjax.Retention(0.25)]),
    *candidates(["keydiff"], [kvjax.Retention(0.5)])[1:],
  )
  samples = {
    Part(task, 1024): [
      suite.draw(task, number, 5, 1024, bundled.tokenizer.count)
      for number in range(4)
    ]
    for task in ("niah_single_2", "niah_multikey_1")
  }
  results = Results(tmp_path, Settings("kvjax-ref", "", "float32", 5))
  compare(bundled, chosen, samples, results, 4, lambda *_: None)
  rows = summarize(list(results.records.values()))
  found = {(row["method"], row["task"]): row["score"] for row in rows}
  assert len(found) == 6
  for task, _ in samples:
    assert found["full", task] >= 90
    assert found["random", task] <= 30
    assert found["keydiff", task] >= 60


@pytest.mark.slow
def test_a_replay_finds_more_than_keys_alone_at_a_tenth(bundled, tmp_path):
  """The samples of docs/methods/kvzip.md: KVzip and KVzip+ beat KeyDiff."""
  chosen = candidates(
    ["keydiff", "kvzip", "kvzip.plus"], [kvjax.Retention(0.1)]
  )
  samples = {
    Part(task, 1024): [
      suite.draw(task, number, 0, 1024, bundled.tokenizer.count)
      for number in range(12)
    ]
    for task in ("niah_single_2", "niah_multikey_1")
  }
  results = Results(tmp_path, Settings("kvjax-ref", "", "float32", 0))
  compare(bundled, chosen, samples, results, 4, lambda *_: None)
  scores: dict[str, list[float]] = {}
  for row in summarize(list(results.records.values())):
    scores.setdefault(row["method"], []).append(row["score"])
  found = {method: np.mean(of) for method, of in scores.items()}
  assert found["kvzip"] > found["keydiff"]
  assert found["kvzip.plus"] > found["keydiff"]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 2048])
def test_it_is_right_without_compression(bundled, length):
  """What the comparison of methods rests on, on seeds of its own."""
  least = {
    "niah_single_1": 0.95,
    "niah_single_2": 0.95,
    "niah_single_3": 0.95,
    "niah_multikey_1": 0.95,
    "niah_multikey_2": 0.95,
    "niah_multikey_3": 0.9,
    "passkey": 0.9,
  }
  for score in validate(bundled, 60, 7, (length,), tuple(least)):
    assert score.whole >= least[score.name], score


@pytest.mark.slow
def test_it_finds_needles_at_every_depth_and_in_every_round(bundled):
  for score in depth_grid(bundled, 10, 7):
    assert score.whole >= 0.85, score
  for score in rounds(bundled, 40, 7):
    assert score.whole >= 0.95, score
