"""Training data of the reference model, and a training that is interrupted."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import train_reference
from experiments.reference import (
  batches,
  curriculum,
  export,
  pieces,
  training,
  vocabulary,
)
from experiments.reference.lessons import LESSONS, draw_row
from experiments.reference.rows import FIRST_WEIGHT, Row, pack
from experiments.reference.validation import Score, validate
from kvjax.errors import InputError
from models import pretrained

PIECES = pieces.Pieces(vocabulary.build())
STAGE = curriculum.Stage(
  "tiny", *(16, 4, 2, 4, 8), {"gapped": 1.0}, (1e-3, 1e-3)
)


SYMBOLS = {PIECES.encode(symbol)[0] for symbol in "0123456789abcdef-"}


@pytest.mark.parametrize("lesson", LESSONS)
def test_rows_fit_and_every_value_stands_in_what_precedes_it(lesson):
  rng = np.random.default_rng(0)
  for _ in range(20):
    row = draw_row(lesson, rng, PIECES, 384)
    assert len(row) == len(row.answer) == len(row.first)
    assert row.answers >= 1
    tokens = np.asarray(row.tokens)
    for place in np.flatnonzero(row.first):
      end = place + 1
      while (
        end < len(row)
        and row.answer[end] == row.answer[place]
        and row.tokens[end] in SYMBOLS
      ):
        end += 1
      windows = np.lib.stride_tricks.sliding_window_view(
        tokens[:place], end - place
      )
      assert (windows == tokens[place:end]).all(axis=1).any()


def test_a_lesson_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match="uuid_key"):
    draw_row("uuid_key", np.random.default_rng(0), PIECES, 64)


def test_packing_scores_answers_first_and_weighs_first_symbols_most():
  row = Row()
  row.add(list(range(10, 30)))
  row.add_answer([1, 2, 3], [1])
  batch = pack([row], 32, 12, 0, np.random.default_rng(0))
  asked = batch.answer[0] >= 0
  np.testing.assert_array_equal(batch.target[0][asked], [1, 2, 3])
  np.testing.assert_array_equal(
    batch.weight[0][asked], [1.0, FIRST_WEIGHT, 1.0]
  )
  assert batch.weight[0][~asked].max() < 0.5
  np.testing.assert_array_equal(
    batch.tokens[0][batch.place[0] + 1], batch.target[0]
  )


def test_accuracy_counts_first_symbols_and_whole_answers():
  row = Row()
  row.add([5, 6])
  row.add_answer([1, 2], [0])
  row.add_answer([3, 4], [0])
  batch = pack([row], 8, 12, 0, np.random.default_rng(0))
  right = batch.target != 4
  assert batches.accuracy(batch, right) == (1.0, 0.5)


@pytest.mark.parametrize("index", range(len(curriculum.STAGES)))
def test_stages_are_consistent_and_their_batches_repeat(index):
  stage = curriculum.STAGES[index]
  assert stage.batch % stage.micro == 0
  gated = {*stage.gate, *stage.whole_gate}
  assert gated <= set(stage.mixture) <= set(LESSONS)
  one = batches.training_batch(stage, index, 3, 0, PIECES)
  two = batches.training_batch(stage, index, 3, 0, PIECES)
  other = batches.training_batch(stage, index, 4, 0, PIECES)
  assert one.tokens.shape == (stage.batch, stage.length)
  np.testing.assert_array_equal(one.tokens, two.tokens)
  np.testing.assert_array_equal(one.weight, two.weight)
  assert (one.tokens != other.tokens).any()


def test_training_resumes_bit_for_bit_after_a_stop(tmp_path, monkeypatch):
  monkeypatch.setattr(train_reference, "_SAVE_EVERY", 1)
  small = dataclasses.replace(training.config(), num_layers=1)
  monkeypatch.setattr(training, "config", lambda: small)
  whole = train_reference.Trainer(tmp_path / "whole", 0, (STAGE,))
  whole.run()
  assert whole.state.total == STAGE.steps

  draw = batches.training_batch

  def stopping(stage, index, step, seed, pieces):
    if step == 2:
      raise KeyboardInterrupt
    return draw(stage, index, step, seed, pieces)

  monkeypatch.setattr(batches, "training_batch", stopping)
  with pytest.raises(KeyboardInterrupt):
    train_reference.Trainer(tmp_path / "stopped", 0, (STAGE,)).run()
  monkeypatch.setattr(batches, "training_batch", draw)
  resumed = train_reference.Trainer(tmp_path / "stopped", 0, (STAGE,))
  assert resumed.state.step == 2
  resumed.run()
  jax.tree.map(
    np.testing.assert_array_equal,
    (whole.state.params, whole.state.moments),
    (resumed.state.params, resumed.state.moments),
  )
  assert resumed.state.tokens == whole.state.tokens
  lines = (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
  assert json.loads(lines[-1])["step"] == STAGE.steps


def test_a_folder_of_another_run_is_refused(tmp_path, monkeypatch):
  small = dataclasses.replace(training.config(), num_layers=1)
  monkeypatch.setattr(training, "config", lambda: small)
  later = dataclasses.replace(STAGE, name="later")
  train_reference.Trainer(tmp_path, 3, (STAGE,)).run()
  with pytest.raises(InputError, match="holds a run with seed 3, not 4"):
    train_reference.Trainer(tmp_path, 4, (STAGE,))
  other = dataclasses.replace(STAGE, mixture={"pairs": 1.0})
  with pytest.raises(InputError, match=r"stages so far \(tiny\) are not"):
    train_reference.Trainer(tmp_path, 3, (other, later))
  trainer = train_reference.Trainer(tmp_path, 3, (STAGE, later))
  assert trainer.state.stage == 1


def test_rates_fall_within_a_stage_and_extensions_repeat_its_second_half():
  stage = dataclasses.replace(STAGE, steps=8, rates=(1e-2, 1e-4))
  rates = [stage.rate(step) for step in range(16)]
  np.testing.assert_allclose(rates[:9:4], [1e-2, 1e-3, 1e-3])
  np.testing.assert_allclose(rates[8:12], rates[4:8])
  np.testing.assert_allclose(rates[12:], rates[4:8])
  assert rates[:8] == sorted(rates[:8], reverse=True)


def test_whole_answers_are_gated_too(tmp_path, monkeypatch):
  small = dataclasses.replace(training.config(), num_layers=1)
  monkeypatch.setattr(training, "config", lambda: small)
  stage = dataclasses.replace(STAGE, whole_gate={"gapped": 1.1})
  trainer = train_reference.Trainer(tmp_path, 0, (stage,))
  trainer.run()
  assert trainer.state.total == 2 * STAGE.steps


def test_an_unknown_stage_is_one_sentence_and_exit_code_2(tmp_path):
  output = tmp_path / "out"
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "experiments.train_reference",
      f"--output={output}",
      "--stages=seed-16,nothing",
    ],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert (
    done.stderr.strip()
    .splitlines()[-1]
    .startswith("There is no training stage 'nothing'; stages are seed-16, ")
  )
  assert not output.exists()


def test_the_card_has_a_line_per_task_and_a_column_per_length():
  scores = [
    Score("one", 1024, 8, 1.0, 1.0),
    Score("many", 1024, 8, 0.96875, 0.875),
    Score("one", 2048, 8, 0.5, 0.5),
    Score("many", 2048, 8, 0.5, 0.25),
  ]
  assert export.table(scores) == (
    "| task | 1,024 tokens | 2,048 tokens |\n"
    "| --- | ---: | ---: |\n"
    "| one | 100.0 | 50.0 |\n"
    "| many | 96.9 (87.5) | 50.0 (25.0) |"
  )


def test_the_bundled_model_answers_with_its_full_cache():
  lm = pretrained.load("models/reference", dtype="float32")
  tasks = ("niah_single_2", "niah_multikey_2", "niah_multikey_3", "passkey")
  scores = list(validate(lm, 4, 1, (1024,), tasks))
  assert min(score.contained for score in scores) >= 0.75, scores
  assert np.mean([score.contained for score in scores]) >= 0.9, scores


@pytest.mark.slow
@pytest.mark.parametrize(
  "length",
  [
    1024,
    pytest.param(
      2048, marks=pytest.mark.xfail(reason="see its card", strict=True)
    ),
  ],
)
def test_the_bundled_model_is_right_without_compression(length):
  """What the comparison of methods rests on, on seeds of its own."""
  lm = pretrained.load("models/reference", dtype="float32")
  least = {
    "niah_single_1": 0.95,
    "niah_single_2": 0.95,
    "niah_single_3": 0.95,
    "niah_multikey_1": 0.95,
    "niah_multikey_2": 0.95,
    "niah_multikey_3": 0.9,
    "passkey": 0.9,
  }
  for score in validate(lm, 60, 7, (length,), tuple(least)):
    assert score.whole >= least[score.task], score


def test_a_stage_that_misses_its_gate_is_extended_by_half(
  tmp_path, monkeypatch
):
  small = dataclasses.replace(training.config(), num_layers=1)
  monkeypatch.setattr(training, "config", lambda: small)
  hard = dataclasses.replace(STAGE, name="hard", gate={"gapped": 1.1})
  trainer = train_reference.Trainer(tmp_path, 0, (hard, STAGE))
  trainer.run()
  # Two extensions, then the next stage, and the newest checkpoint says so.
  assert trainer.state.total == 2 * STAGE.steps + STAGE.steps
  again = train_reference.Trainer(tmp_path, 0, (hard, STAGE))
  assert again.state.stage == 2
  assert again.state.total == trainer.state.total
