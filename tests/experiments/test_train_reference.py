"""Training data of the reference model, and a training that is interrupted."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax.errors import InputError
from kvjax.experiments.reference import (
  batches,
  curriculum,
  pieces,
  trainer,
  training,
  vocabulary,
)
from kvjax.experiments.reference.growth import deepened
from kvjax.experiments.reference.lessons import LESSONS, draw_row
from kvjax.experiments.reference.rows import FIRST_WEIGHT, Row, pack
from kvjax.experiments.reference.trainer import Trainer
from kvjax.models.language_model import from_decoder

PIECES = pieces.Pieces(vocabulary.build())
STAGE = curriculum.Stage(
  "tiny", *(16, 4, 2, 4, 8), {"gapped": 1.0}, (1e-3, 1e-3)
)


SYMBOLS = {PIECES.encode(symbol)[0] for symbol in "0123456789abcdef-"}


@pytest.fixture
def small(monkeypatch):
  """Trainings are of one layer."""
  config = dataclasses.replace(training.config(), num_layers=1)
  monkeypatch.setattr(training, "config", lambda: config)


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
  assert set(stage.gate) <= set(stage.mixture) <= set(LESSONS)
  one = batches.training_batch(stage, index, 3, 0, PIECES)
  two = batches.training_batch(stage, index, 3, 0, PIECES)
  other = batches.training_batch(stage, index, 4, 0, PIECES)
  assert one.tokens.shape == (stage.batch, stage.length)
  np.testing.assert_array_equal(one.tokens, two.tokens)
  np.testing.assert_array_equal(one.weight, two.weight)
  assert (one.tokens != other.tokens).any()


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_folder_of_another_run_is_refused(tmp_path):
  later = dataclasses.replace(STAGE, name="later")
  Trainer(tmp_path, 3, (STAGE,)).run()
  with pytest.raises(InputError, match="holds a run with seed 3, not 4"):
    Trainer(tmp_path, 4, (STAGE,))
  other = dataclasses.replace(STAGE, mixture={"pairs": 1.0})
  with pytest.raises(InputError, match=r"stages so far \(tiny\) are not"):
    Trainer(tmp_path, 3, (other, later))
  assert Trainer(tmp_path, 3, (STAGE, later)).state.stage == 1
  deeper = dataclasses.replace(STAGE, layers=2)
  with pytest.raises(InputError, match=r"stages so far \(tiny\) are not"):
    Trainer(tmp_path, 3, (deeper, later))


def logits_of(decoder):
  model, params = from_decoder(decoder)
  tokens = np.random.default_rng(0).integers(0, 99, (2, 9), np.int32)
  place = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))
  return training.scored_logits(
    model, params, jnp.asarray(tokens), jnp.asarray(place)
  )


@pytest.mark.slow
def test_a_deeper_decoder_computes_the_same_and_can_learn(monkeypatch):
  config = dataclasses.replace(training.config(), num_layers=3)
  monkeypatch.setattr(training, "config", lambda: config)
  decoder = training.initial_decoder(0)
  deeper = deepened(decoder, 5, 1)
  assert deeper.config.num_layers == 5
  np.testing.assert_array_equal(logits_of(decoder), logits_of(deeper))
  attention = deeper.layers[0].self_attn
  kernels = attention.o_proj.kernel[...]
  assert [bool(kernel.any()) for kernel in kernels] == [1, 0, 1, 0, 1]
  assert attention.v_proj.kernel[1].any()
  for layers in (2, 7):
    with pytest.raises(ValueError, match="A decoder of 3 layers cannot get"):
      deepened(decoder, layers, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_training_resumes_bit_for_bit_after_each_stop(tmp_path, monkeypatch):
  """Also in a stage that deepens the decoder."""
  monkeypatch.setattr(trainer, "_SAVE_EVERY", 1)
  stages = (STAGE, dataclasses.replace(STAGE, name="deeper", layers=2))
  whole = Trainer(tmp_path / "whole", 0, stages)
  whole.run()
  assert whole.decoder().config.num_layers == 2
  assert whole.state.total == 2 * STAGE.steps

  draw = batches.training_batch
  for place in ((0, 2), (1, 2)):

    def stopping(stage, index, step, seed, pieces, place=place):
      if (index, step) == place:
        raise KeyboardInterrupt
      return draw(stage, index, step, seed, pieces)

    monkeypatch.setattr(batches, "training_batch", stopping)
    with pytest.raises(KeyboardInterrupt):
      Trainer(tmp_path / "stopped", 0, stages).run()
    monkeypatch.setattr(batches, "training_batch", draw)
    resumed = Trainer(tmp_path / "stopped", 0, stages)
    assert (resumed.state.stage, resumed.state.step) == place
  resumed.run()
  jax.tree.map(
    np.testing.assert_array_equal,
    (whole.state.params, whole.state.moments),
    (resumed.state.params, resumed.state.moments),
  )
  assert resumed.state.tokens == whole.state.tokens
  # The optimizer has begun anew.
  counts = optax.tree_utils.tree_get(whole.state.moments, "count")
  assert int(counts) == STAGE.steps
  lines = (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
  assert json.loads(lines[-1])["step"] == STAGE.steps


def test_rates_fall_within_a_stage_and_extensions_repeat_its_second_half():
  stage = dataclasses.replace(STAGE, steps=8, rates=(1e-2, 1e-4))
  rates = [stage.rate(step) for step in range(16)]
  np.testing.assert_allclose(rates[:9:4], [1e-2, 1e-3, 1e-3])
  np.testing.assert_allclose(rates[8:12], rates[4:8])
  np.testing.assert_allclose(rates[12:], rates[4:8])
  assert rates[:8] == sorted(rates[:8], reverse=True)


@pytest.mark.parametrize(
  ("output", "flag", "sentence"),
  [
    (
      "new",
      "--stages=seed-16,nothing",
      "There is no training stage 'nothing'; stages are seed-16, ",
    ),
    ("file/run", "--seed=0", "file is no folder."),
    ("/proc/run", "--seed=0", "/proc/run cannot be written: "),
    ("new", "--seed=-1", "--seed=-1"),
  ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(
  refusal, tmp_path, output, flag, sentence
):
  (tmp_path / "file").write_text("")
  output = tmp_path / output
  told = refusal(
    "kvjax.experiments.train_reference", f"--output={output}", flag
  )
  assert sentence in told
  assert not output.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_stage_that_misses_its_gate_is_extended_by_half(tmp_path):
  hard = dataclasses.replace(STAGE, name="hard", gate={"gapped": 1.1})
  run = Trainer(tmp_path, 0, (hard, STAGE))
  run.run()
  # Two extensions, then the next stage, and the newest checkpoint says so.
  assert run.state.total == 2 * STAGE.steps + STAGE.steps
  again = Trainer(tmp_path, 0, (hard, STAGE))
  assert again.state.stage == 2
  assert again.state.total == run.state.total


@pytest.mark.usefixtures("small")
@pytest.mark.slow
def test_the_loss_is_read_now_and_then(tmp_path, monkeypatch):
  shown, losses = [], []

  @contextlib.contextmanager
  def bar(name, left):
    assert (name, left) == ("tiny", range(4))
    yield lambda *told: shown.append(told)

  def step(*args):
    found = take_step(*args)
    losses.append(found[2])
    return found

  take_step = training.train_step
  monkeypatch.setattr(training, "train_step", step)
  monkeypatch.setattr(trainer, "step_bar", bar)
  monkeypatch.setattr(trainer, "_SHOW_EVERY", 2)
  run = Trainer(tmp_path, 0, (STAGE,))
  run.run()
  assert shown == [(2, float(losses[1])), (4, float(losses[3]))]
  assert run.state.seconds > 0


def test_batches_are_drawn_one_ahead_and_no_further():
  drawn = []

  def draw(step):
    drawn.append(step)
    if step == 5:
      raise KeyboardInterrupt
    return -step

  ahead = batches.ahead(draw, range(2, 6))
  assert next(ahead) == -2
  assert next(ahead) == -3
  assert len(drawn) <= 3
  assert next(ahead) == -4
  with pytest.raises(KeyboardInterrupt):
    next(ahead)
  assert drawn == [2, 3, 4, 5]
  assert list(batches.ahead(draw, range(3, 3))) == []
