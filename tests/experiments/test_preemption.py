"""SIGTERM comes while a training has steps that are not saved."""

import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.experiments import exits
from kvjax.experiments.finetuning import training
from kvjax.experiments.finetuning.tuner import Recipe, Tuner
from kvjax.experiments.run import multihost, preemption
from kvjax.prompts import Prompts

# Three steps make an epoch.
PARTS = Prompts.of([[5, 6, 7]] * 5, training.QUERIES)
RECIPE = Recipe(2, ("q",), 4, 1e-2, 2, 0)
PROGRAM = """
import sys, time
from kvjax.experiments import cli, exits, interrupts
from kvjax.experiments.run.preemption import Preemption

def main():
  with Preemption() as preempted:
    assert not preempted.reached()
    if "saved" in sys.argv:
      preempted.saved()
    if "stuck" in sys.argv:
      interrupts.SAVING_SECONDS = 0.5
    print("ready", flush=True)
    while not preempted._came:
      time.sleep(0.02)
    # Longer than other programs may go on for.
    time.sleep(60 if "stuck" in sys.argv else 2)
    if preempted.reached():
      raise exits.StoppedError("Saved.")

cli.run_on_arguments(lambda arguments: main())
"""


@pytest.fixture
def take_steps(monkeypatch):
  """Lets steps only add one; in the one with this number, SIGTERM comes."""

  def patch(preempted):
    taken = []

    def take(model, schedule, adapter, moments, *rest):
      del model, schedule, rest
      taken.append(None)
      if len(taken) == preempted:
        os.kill(os.getpid(), signal.SIGTERM)
      adapter = jax.tree.map(lambda leaf: leaf + 1, adapter)
      return adapter, moments, jnp.zeros(())

    monkeypatch.setattr(training, "train_step", take)
    monkeypatch.setattr(training, "measure", lambda *given: jnp.ones(()))

  return patch


def started(output, lm):
  return Tuner(output, lm, PARTS, RECIPE, {})


# The second one ends an epoch.
@pytest.mark.parametrize("preempted", [2, 3])
def test_a_training_saves_its_last_step_and_goes_on_from_there(
  tiny, tmp_path, take_steps, preempted
):
  before = signal.getsignal(signal.SIGTERM)
  run = started(tmp_path, tiny)
  take_steps(preempted)
  with pytest.raises(exits.StoppedError) as stopped:
    run.run()
  assert signal.getsignal(signal.SIGTERM) == before
  assert str(stopped.value) == (
    f"Stopped; step {preempted} of 12 is saved, and the same command goes on "
    "from there."
  )
  resumed = started(tmp_path, tiny)
  assert resumed.state.total == preempted
  jax.tree.map(
    np.testing.assert_array_equal, run.state.params, resumed.state.params
  )
  take_steps(None)
  resumed.run()
  lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
  assert [line["epoch"] for line in lines] == [0, 1, 2, 3, 4]


def test_an_interrupt_of_a_measurement_ends_a_training(
  tiny, tmp_path, take_steps, monkeypatch
):
  class Loss:
    def __float__(self):
      os.kill(os.getpid(), signal.SIGTERM)
      return 1.0

    # NumPy would take the interrupt for another error.
    def __array__(self, *_, **__):
      return np.asarray(float(self))

  run = started(tmp_path, tiny)
  take_steps(None)
  monkeypatch.setattr(training, "measure", lambda *given: Loss())
  with pytest.raises(exits.Preempted):
    run.run()
  assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
  ("work", "message"),
  [("saved", "Stopped."), ("unsaved", "Saved."), ("stuck", "Stopped.")],
)
def test_only_unsaved_work_postpones_the_end_and_not_for_ever(work, message):
  command = [sys.executable, "-c", PROGRAM, work]
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, said = process.communicate(timeout=50)
  assert process.returncode == 143
  assert said == f"{message}\n"


@pytest.fixture
def two_hosts(monkeypatch):
  """Lets another host answer; yields its answers, and what it was asked."""
  answers, asked = [], []

  def gather(payload):
    asked.append(json.loads(payload))
    return [payload, json.dumps(answers.pop(0)).encode()]

  monkeypatch.setattr(multihost, "count", lambda: 2)
  monkeypatch.setattr(multihost, "gather", gather)
  return answers, asked


def test_hosts_are_asked_every_few_seconds_of_the_slower_ones_steps(
  two_hosts, monkeypatch
):
  now = iter(range(100))
  monkeypatch.setattr(preemption.time, "monotonic", lambda: next(now))
  answers, asked = two_hosts
  # At first steps take 60 s, with their compilation, later 1.5 s.
  answers += [[False, 60.0], [False, 1.5], [True, 1.5]]
  with preemption.Preemption() as preempted:
    reached = [preempted.reached() for _ in range(5)]
  assert reached == [False, False, False, False, True]
  assert len(asked) == 3
  assert not any(came for came, _ in asked)


def test_what_comes_to_one_host_reaches_all_after_the_same_step(two_hosts):
  answers, asked = two_hosts
  answers += [[False, 9.0], [False, 9.0]]
  with preemption.Preemption() as preempted:
    assert not preempted.reached()
    os.kill(os.getpid(), signal.SIGTERM)
    assert preempted.reached()
  assert [came for came, _ in asked] == [False, True]
  assert not exits.POSTPONED.is_set()


def test_of_two_hosts_none_leaves_alone_after_a_checkpoint(two_hosts):
  answers, asked = two_hosts
  answers += [[False, 9.0], [False, 9.0]]
  with preemption.Preemption() as preempted:
    assert not preempted.reached()
    os.kill(os.getpid(), signal.SIGTERM)
    preempted.saved()
    # An epoch is measured for the log.
    assert preempted.noticed()
  assert [came for came, _ in asked] == [False, True]


def test_what_comes_while_an_epoch_is_measured_ends_all_hosts(
  tiny, tmp_path, two_hosts, take_steps, monkeypatch
):
  monkeypatch.setattr(multihost, "from_first", lambda make: make())
  monkeypatch.setattr(multihost, "on_first", lambda act: act())
  monkeypatch.setattr(multihost, "gather", lambda payload: [payload])
  run = started(tmp_path, tiny)
  take_steps(None)
  measured = []

  def measure(*given):
    measured.append(given)
    # Of the second epoch, the second of three batches; the start is one, too.
    if len(measured) == 8:
      os.kill(os.getpid(), signal.SIGTERM)
    return jnp.ones(())

  monkeypatch.setattr(training, "measure", measure)
  monkeypatch.setattr(preemption, "_BETWEEN", 0.0)
  with pytest.raises(exits.StoppedError, match="step 6 of 12 is saved"):
    run.run()
  assert len(measured) == 8
  assert started(tmp_path, tiny).state.total == 6
