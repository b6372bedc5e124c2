"""The training of Fast KVzip's gates: what it learns, writes and refuses."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from gate_texts import write_texts

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.finetuning import documents
from kvjax.experiments.gate_training import (
  descent,
  examples,
  fast_kvzip_learner,
)
from kvjax.experiments.gate_training.fast_kvzip_learner import FastKVzipLearner
from kvjax.experiments.gate_training.learner import Examples, mean_r2
from kvjax.experiments.gate_training.trainer import Trainer
from kvjax.methods.fast_kvzip_gate import RANKS, FastKVzipGate

MODULE = "kvjax.experiments.train_gate"
WIDTH, HEADS, GROUP = 12, 3, 2


def learner(**changes):
  made = {"epochs": 3, "learning_rate": 0.2, "batch": 64, "seed": 0}
  return FastKVzipLearner(group=GROUP, **(made | changes))


def teacher(seed=0):
  """A gate of one layer whose scores differ between tokens."""
  random = np.random.default_rng(seed)
  shapes = {
    "q_proj.weight": (HEADS * GROUP * 16, WIDTH),
    "q_proj.bias": (HEADS * GROUP * 16,),
    "k_proj.weight": (HEADS * 16, WIDTH),
    "k_base": (HEADS, 1, 16, 16),
    "b": (HEADS, 1, GROUP),
  }
  weights = {
    name: random.standard_normal(shape).astype(np.float32)
    for name, shape in shapes.items()
  }
  gains = dict.fromkeys(("q_norm.weight", "k_norm.weight"), np.ones(16, "f4"))
  return weights | gains


def drawn(count, seed=0):
  """Inputs, and what a teacher makes of them by the formula in float64."""
  inputs = np.random.default_rng(seed).standard_normal((count, WIDTH))
  given = {n: w.astype(np.float64) for n, w in teacher().items()}

  def normalized(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

  queries = inputs @ given["q_proj.weight"].T + given["q_proj.bias"]
  queries = normalized(queries.reshape(count, HEADS, GROUP, 16))
  keys = normalized((inputs @ given["k_proj.weight"].T).reshape(count, -1, 16))
  own = np.einsum("nkgp,nkp->nkg", queries, keys) / 4 + given["b"][None, :, 0]
  others = np.einsum("nkgp,khp->nkgh", queries, given["k_base"][:, 0]) / 4
  scores = 1 / (1 + np.exp(others - own[..., None]).sum(-1))
  return Examples(inputs.astype(np.float32), scores.mean(-1).astype(np.float32))


def entropy(predicted, targets):
  """Mean binary cross-entropy, in float64."""
  p, y = np.float64(predicted), np.float64(targets)
  return -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))


def test_a_gate_learns_what_another_one_scores():
  learned, tested = drawn(6000), drawn(500, seed=1)
  made = learner(epochs=60, batch=200, learning_rate=1.0)
  predicted = made.predict(made.fit(learned, 0), tested.inputs)
  assert predicted.shape == (500, HEADS)
  assert mean_r2(predicted, tested.targets) > 0.9
  # Nothing has less cross-entropy than the scores themselves.
  least = entropy(tested.targets, tested.targets)
  mean = np.broadcast_to(learned.targets.mean(0), tested.targets.shape)
  found = entropy(predicted, tested.targets)
  assert least < found < least + 0.1 * (entropy(mean, tested.targets) - least)


def test_predictions_are_the_methods_scores():
  given = drawn(9)
  predicted = learner().predict(teacher(), given.inputs)
  np.testing.assert_allclose(predicted, given.targets, rtol=1e-4, atol=1e-6)


def test_heads_start_at_their_means_but_for_what_products_add():
  given = drawn(2000)
  targets = np.full((2000, HEADS), [0.02, 0.3, 0.9], np.float32)
  made = learner(epochs=1, learning_rate=1e-9)

  def logits(scores):
    return np.log(1 / made.predict(made.fit(scores, 0), given.inputs) - 1)

  even = np.full_like(targets, 1 / 17)  # for which b is 0
  shift = logits(Examples(given.inputs, targets)) - logits(
    Examples(given.inputs, even)
  )
  expected = np.log(1 / targets[0] - 1) - np.log(16)
  np.testing.assert_allclose(shift.mean(0), expected, rtol=0.1)


def test_a_fit_is_that_of_its_seed_and_layer():
  given = drawn(200)
  one, same, other, below = (
    learner(seed=seed).fit(given, layer)["k_base"]
    for seed, layer in ((0, 1), (0, 1), (1, 1), (0, 0))
  )
  np.testing.assert_array_equal(one, same)
  assert np.abs(one - other).max() > 1e-3
  assert np.abs(one - below).max() > 1e-3


@pytest.mark.parametrize(
  ("count", "batch", "epochs", "steps"),
  [(50, 20, 7, 14), (50, 64, 3, 3), (50, 25, None, 5000), (7, 3, None, 5000)],
)
def test_it_takes_as_many_steps_as_said(
  count, batch, epochs, steps, monkeypatch
):
  taken = []

  def counted(weights, moments, *data, descent, steps):
    taken.append((len(data[2]), steps))
    return weights, moments

  monkeypatch.setattr(descent, "_epoch", counted)
  learner(batch=batch, epochs=epochs).fit(drawn(count), 0)
  assert sum(n for n, _ in taken) == steps
  assert {n for _, n in taken} == {steps}


def test_a_learning_rate_rises_and_is_halved_twice(monkeypatch):
  """Of gradients of one, each step moves b by the rates so far."""
  monkeypatch.setattr(fast_kvzip_learner, "_MOMENTUM", 0.0)
  optimizer = fast_kvzip_learner._optimizer(0.2, 1000)
  state, moved = optimizer.init(0.0), []
  with jax.numpy_dtype_promotion("standard"):
    for _ in range(1000):
      update, state = optimizer.update(1.0, state)
      moved.append(-float(update))
  rates = [moved[n] for n in (0, 5, 10, 499, 500, 749, 750, 999)]
  expected = [0.0, 0.1, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05]
  np.testing.assert_allclose(rates, expected, rtol=1e-6)


def saved(folder, layers=3):
  weights = {
    name: np.stack([teacher(seed)[name] for seed in range(layers)])
    for name in RANKS
  }
  FastKVzipGate(weights, "").save(folder)
  return weights


def test_what_is_saved_is_read_again(tmp_path):
  weights = saved(tmp_path)
  for path in (tmp_path, tmp_path / "model.safetensors"):
    gate = FastKVzipGate.read(str(path))
    assert (gate.layers, gate.heads, gate.width) == (3, HEADS, WIDTH)
    jax.tree.map(np.testing.assert_array_equal, dict(gate.weights), weights)
  names = safetensors.numpy.load_file(tmp_path / "model.safetensors").keys()
  assert {*names} == {f"layers.{n}.{name}" for n in range(3) for name in RANKS}


def test_files_that_do_not_fit_are_refused(tmp_path):
  saved(tmp_path)
  path = tmp_path / "model.safetensors"
  whole = safetensors.numpy.load_file(path)

  def refused(tensors, match):
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(InputError, match=match) as caught:
      FastKVzipGate.read(str(tmp_path))
    assert "\n" not in str(caught.value)

  refused({"weights": np.ones(3, "f4")}, r"has no layers\.0\.b; kvjax train")
  without = {n: w for n, w in whole.items() if n != "layers.1.k_base"}
  refused(without, "k_base of .* must be finite numbers")
  refused(whole | {"layers.2.b": np.ones((HEADS, 1, 3), "f4")}, "b of .* must")
  path.write_bytes(b"none")
  with pytest.raises(InputError, match="is no file of safetensors"):
    FastKVzipGate.read(str(tmp_path))
  (tmp_path / "another.pt").write_bytes(b"")
  with pytest.raises(InputError, match="has 2 files named"):
    FastKVzipGate.read(str(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return write_texts(tmp_path_factory.mktemp("documents"))


def test_what_is_trained_is_a_method(
  run_binary, tiny_directory, folder, tiny, tmp_path
):
  output = tmp_path / "gate"
  arguments = (
    *(f"--model={tiny_directory}", f"--documents={folder}", "--length=60"),
    *("--tokens=30", "--epochs=3", "--kind=fast_kvzip", f"--output={output}"),
  )
  done = run_binary(MODULE, *arguments)
  assert done.returncode == 0, done.stderr
  names = {path.name for path in output.iterdir()}
  assert names == {"model.safetensors", "validation.json", "run.json"}
  assert "layer 1: R2" in done.stdout
  again = run_binary(MODULE, *arguments)
  assert again.returncode == 0
  assert "layer 1" not in again.stdout
  other = run_binary(MODULE, *arguments, "--kind=linear")
  assert other.returncode == 2
  assert "fast_kvzip" in other.stderr
  run = json.loads((output / "run.json").read_text())
  assert "fast_kvzip" in json.dumps(run)
  prompts = kvjax.Prompts.of([list(range(3, 200))])
  for budget in (kvjax.Tokens(9), kvjax.Threshold(0.5, 8)):
    plan = kvjax.get_plan(f"fast_kvzip:gate={output}", budget)
    cache, _ = kvjax.prefill(tiny.model, tiny.params, prompts, plan)
    assert cache.lengths.max() <= 197


def test_a_stopped_run_goes_on_to_the_same_weights(
  tiny, folder, tmp_path, monkeypatch
):
  rows = examples.rows_of(documents.read(folder), tiny.text, 60, 100)[:3]

  def train(name):
    made = learner(epochs=2)
    made = dataclasses.replace(made, group=tiny_group(tiny))
    return Trainer(tmp_path / name, tiny, rows, 30, made, {}).run()

  whole = train("whole")
  fit = FastKVzipLearner.fit

  def stopped(self, found, layer):
    if layer == 1:
      raise KeyboardInterrupt
    return fit(self, found, layer)

  with monkeypatch.context() as patch:
    patch.setattr(FastKVzipLearner, "fit", stopped)
    with pytest.raises(KeyboardInterrupt):
      train("stopped")
  assert not (tmp_path / "stopped" / "model.safetensors").exists()
  assert train("stopped")["r2"] == whole["r2"]
  first, second = (
    safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
    for name in ("whole", "stopped")
  )
  jax.tree.map(np.testing.assert_array_equal, first, second)


def tiny_group(tiny):
  spec = tiny.model.geometry.layers[0]
  return spec.heads // spec.kv_heads


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--hidden=3"], "--kind=fast_kvzip has no hidden layer"),
    (["--learning_rate=2"], "above 0 and at most 1"),
  ],
)
def test_what_is_wrong_is_one_sentence(
  refusal, tiny_directory, folder, arguments, sentence, tmp_path
):
  said = refusal(
    MODULE,
    *(f"--model={tiny_directory}", f"--documents={folder}"),
    *("--kind=fast_kvzip", f"--output={tmp_path / 'out'}", *arguments),
  )
  assert sentence in said
  assert not (tmp_path / "out").exists()


def test_heads_whose_tokens_all_score_alike_are_learned():
  given = drawn(300)
  targets = np.full((300, HEADS), [0.0, 0.25, 1.0], np.float32)
  made = learner(epochs=200, batch=100, learning_rate=1.0)
  weights = made.fit(Examples(given.inputs, targets), 0)
  predicted = made.predict(weights, given.inputs)
  np.testing.assert_allclose(predicted, targets, atol=0.02)
