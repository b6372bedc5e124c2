"""Fine-tuning whose --output is an address goes on on another machine."""

import dataclasses
import json
import os
import pathlib
import signal
import tempfile
import threading
import time
import uuid

import jax
import numpy as np
import pytest
from memory_store import empty_store

from kvjax.experiments.finetuning import training, tuner
from kvjax.experiments.finetuning.tuner import Recipe, Tuner
from kvjax.experiments.run import outputs, sending
from kvjax.prompts import Prompts

RUN = "/bucket/runs/tuned"
# Two steps make an epoch.
RECIPE = Recipe(2, ("q",), 2, 1e-2, 2, 0)
PARTS = Prompts.of(
  ([5, 6, 7, 8, 5, 6, 7], [9, 8, 7], [4, 9, 4, 9, 4]), training.QUERIES
)


@pytest.fixture
def store(monkeypatch):
  """A store in memory, to which everything is sent at once."""
  monkeypatch.setattr(sending, "_COPIES", [])
  monkeypatch.setattr(sending, "_ANYWHERE", threading.Event())
  monkeypatch.setattr(sending, "_BETWEEN", 0.0)
  monkeypatch.setattr(tuner, "_SAVE_EVERY", 1)
  return empty_store(monkeypatch)


@pytest.fixture
def machine(monkeypatch, tmp_path):
  """Starts a run as on another machine, which has the address alone."""
  made = []

  def start(lm):
    made.append(tmp_path / f"machine{len(made)}")
    made[-1].mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made[-1]))
    sending._COPIES.clear()
    folder = outputs.run_folder(f"memory:/{RUN}")
    return Tuner(folder, lm, PARTS, RECIPE, {})

  return start


def names(store):
  return {name.removeprefix(f"{RUN}/") for name in store.find(RUN)}


def steps_at(store):
  """The steps of the checkpoints at the address."""
  folders = (name.split("/") for name in names(store))
  return {int(path[1]) // 256 for path in folders if path[0] == ".checkpoints"}


def killed_after(steps, run, monkeypatch):
  """Takes steps and then none, as if the machine had been switched off."""
  take = training.train_step

  def stop(*arguments):
    if run.state.total == steps:
      raise SystemExit
    return take(*arguments)

  with monkeypatch.context() as patched:
    patched.setattr(training, "train_step", stop)
    with pytest.raises(SystemExit):
      run.run()


def log_of(text):
  return [json.loads(line) | {"seconds": 0} for line in text.splitlines()]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_goes_on_from_what_is_at_the_address(
  tiny, store, machine, monkeypatch, tmp_path, caplog, damaged
):
  (tmp_path / "whole").mkdir()
  whole = Tuner(tmp_path / "whole", tiny, PARTS, RECIPE, {})
  whole.run()
  killed_after(3, machine(tiny), monkeypatch)
  assert steps_at(store) == {2, 3}
  if damaged:
    # Files are sent in the order of their making: these are the last ones.
    for name in ("commit_success.txt", "state/manifest.ocdbt"):
      store.rm(f"{RUN}/.checkpoints/768/{name}")
  with sending.sending():
    run = machine(tiny)
    assert run.state.total == 3 - damaged
    run.run()
  said = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
  lost = f"The checkpoint memory:/{RUN}/.checkpoints/768 is damaged, and passed"
  assert said == [f"{lost} over."] * damaged
  jax.tree.map(
    np.testing.assert_array_equal,
    *((each.state.params, each.state.moments) for each in (whole, run)),
  )
  assert steps_at(store) == {3, 4}
  assert {name for name in names(store) if "checkpoints" not in name} == {
    "run.json",
    "log.jsonl",
  }
  log = (tmp_path / "whole" / "log.jsonl").read_text()
  assert log_of(store.cat(f"{RUN}/log.jsonl").decode()) == log_of(log)
  again = machine(tiny)
  assert dataclasses.replace(again.state, params=0, moments=0) == (
    dataclasses.replace(run.state, params=0, moments=0)
  )
  jax.tree.map(
    np.testing.assert_array_equal, again.state.params, run.state.params
  )


def test_a_checkpoint_that_is_being_written_is_not_sent(store):
  with sending.sending():
    folder = outputs.run_folder(f"memory:/{RUN}")
    part = folder / ".checkpoints" / "256.orbax-checkpoint-tmp"
    part.mkdir(parents=True)
    (part / "manifest").write_text("half")
    sending.send_if_due()
    assert names(store) == set()
    part.rename(folder / ".checkpoints" / "256")
  assert names(store) == {".checkpoints/256/manifest"}


@pytest.fixture
def documents(tmp_path):
  folder = tmp_path / "documents"
  folder.mkdir()
  text = "The file is read when the others have been closed. "
  (folder / "a.txt").write_text(text * 16)
  return folder


@pytest.mark.slow
def test_a_preempted_program_sends_what_it_has_and_goes_on_from_there(
  run_binary, tiny_directory, documents, tmp_path
):
  # A name that no copy of an earlier run has.
  folder, there = tmp_path / "folder", tmp_path / uuid.uuid4().hex
  address = f"file://{there}"

  def tune(output, meanwhile=lambda process: None):
    return run_binary(
      "kvjax.experiments.finetune",
      *(f"--model={tiny_directory}", f"--documents={documents}"),
      *("--length=32", "--rank=2", "--epochs=10", "--batch=2"),
      *("--verbosity=0", f"--output={output}"),
      meanwhile=meanwhile,
    )

  def preempt(process):
    here, ends = pathlib.Path(tempfile.gettempdir()), time.monotonic() + 300
    while not list(here.glob(f"kvjax-*/{there.name}/.checkpoints/*/state")):
      assert time.monotonic() < ends
      time.sleep(0.02)
    os.kill(process, signal.SIGTERM)

  alone = tune(folder)
  assert alone.returncode == 0, alone.stderr
  stopped = tune(address, preempt)
  assert stopped.returncode == 143, stopped.stderr
  assert not (there / "config.json").exists()
  newest = max(int(path.name) for path in (there / ".checkpoints").iterdir())
  done = tune(address)
  assert done.returncode == 0, done.stderr
  assert f"Starting after step {newest // 256} of" in done.stderr
  said = f"The finetuned model is in {address}, its adapters in {address}/ada"
  assert said in done.stdout
  ours, theirs = (
    {
      str(path.relative_to(output)): path.read_bytes()
      for path in output.rglob("*")
      if path.is_file() and ".checkpoints" not in path.parts
    }
    for output in (there, folder)
  )
  logs = [log_of(files.pop("log.jsonl").decode()) for files in (ours, theirs)]
  assert logs[0] == logs[1]
  assert ours == theirs
