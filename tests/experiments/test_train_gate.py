"""The program that trains gates: what it learns, resumes and refuses."""

import json

import numpy as np
import pytest
import replayed
import safetensors.numpy
from gate_texts import WORDS, write_texts

import kvjax
from kvjax.engine.replay_targets import replay_targets
from kvjax.errors import InputError
from kvjax.experiments.finetuning import documents
from kvjax.experiments.gate_training import examples
from kvjax.experiments.gate_training.fast_kvzip_learner import FastKVzipLearner
from kvjax.experiments.gate_training.kvzap_learner import KVzapLearner
from kvjax.experiments.gate_training.learner import Examples, mean_r2
from kvjax.experiments.gate_training.trainer import Trainer
from kvjax.experiments.main import PROGRAMS
from kvjax.methods.kvzap_gate import KVzapGate
from kvjax.methods.replay import Replay
from kvjax.testing import TinyModel

MODULE = "kvjax.experiments.train_gate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return write_texts(tmp_path_factory.mktemp("documents"))


def learner(kind="mlp", **changes):
  made = {
    "hidden": 24,
    "epochs": 40,
    "learning_rate": 1e-2,
    "batch": 64,
    "seed": 0,
  }
  return KVzapLearner(kind=kind, **(made | changes))


def drawn(count, seed=0):
  """Inputs far from standard, and scores that are not linear in them."""
  random = np.random.default_rng(seed)
  x = random.standard_normal((count, 6))
  y = np.stack([x[:, 0] * x[:, 1], np.abs(x[:, 2]) - x[:, 3]], axis=1) - 7
  inputs = x * np.array([1, 30, 1, 0.1, 1, 5]) + np.arange(6)
  return Examples(inputs.astype(np.float32), y.astype(np.float32))


def test_ridge_regression_solves_its_equations():
  found = drawn(50)
  weights, biases = learner("linear").fit(found, 0).values()
  x, y = (np.asarray(a, np.float64) for a in found)
  # The gradient of |y - Wx - b|^2 + |W|^2 is zero.
  left = y - x @ weights.T.astype(np.float64) - biases
  np.testing.assert_allclose(left.sum(axis=0), 0, atol=2e-3)
  np.testing.assert_allclose(left.T @ x, weights, atol=2e-2)


def test_a_hidden_layer_learns_what_a_linear_map_cannot():
  learned, tested = drawn(4000), drawn(500, seed=1)
  found = {}
  for kind in ("mlp", "linear"):
    weights = learner(kind).fit(learned, 3)
    predicted = learner(kind).predict(weights, tested.inputs)
    found[kind] = mean_r2(predicted, tested.targets)
  assert found["mlp"] > 0.9
  assert found["linear"] < 0.5


def test_a_fit_is_that_of_its_seed_and_layer():
  learned = drawn(200)
  one, same, other, below = (
    learner(epochs=2, seed=seed).fit(learned, layer)["weight0"]
    for seed, layer in ((0, 1), (0, 1), (1, 1), (0, 0))
  )
  np.testing.assert_array_equal(one, same)
  assert np.abs(one - other).max() > 1e-3
  assert np.abs(one - below).max() > 1e-3


def test_targets_are_the_most_that_the_repeated_text_pays():
  """Of a softmax over the text, the request and the text again, in float64."""
  model = TinyModel()
  params = model.init()
  written = replayed.Written(model, params)
  rows = [[5, 6, 7, *range(20, 50)], [9, *range(30, 50)]]
  request = kvjax.RepeatRequest((5, 6), (11, 12), (13,), (2,))
  prompts = kvjax.Prompts.of(rows, repeat_request=request)
  width = prompts.tokens.shape[1]
  replay = Replay(chunk=width, weight="output", of_text=True)
  found = replay_targets(model, params, prompts, replay)
  assert [*found] == [0, 1]
  differing = 0
  for row, (tokens, prefix) in enumerate(zip(rows, (2, 0), strict=True)):
    end = len(tokens)
    read_twice = [*tokens, *request.first, *request.suffix, *tokens[prefix:]]
    seen_by_layer = written.run(read_twice)
    for layer, spec in enumerate(model.geometry.layers):
      seen = seen_by_layer[layer]
      group = spec.heads // spec.kv_heads
      values = seen["values"][:, prefix:end].repeat(group, 0)
      out = values @ seen["output"].reshape(spec.heads, -1, model.width)
      paid = replayed.softmax(seen["logits"])[:, end:, prefix:end]
      paid = paid * np.linalg.norm(out, axis=-1)[:, None]
      norms = np.linalg.norm(seen["inputs"][end:], axis=-1)
      paid = (paid / norms[:, None]).reshape(
        spec.kv_heads, group, *paid.shape[1:]
      )
      asked = len(request.first) + len(request.suffix)
      expected = paid[:, :, asked:].max(axis=(1, 2))
      # What the request pays more of makes a difference.
      differing += (paid.max(axis=(1, 2)) > 1.01 * expected).sum()
      ours = np.asarray(found[layer].scores)[row]
      assert (ours[:, :prefix] == -1).all()
      np.testing.assert_allclose(ours[:, prefix:end], expected, rtol=1e-4)
      inputs = np.asarray(found[layer].inputs)[row, :end]
      np.testing.assert_allclose(inputs, seen["inputs"][:end], atol=1e-4)
  assert differing > 3


@pytest.mark.parametrize(
  ("made", "weight", "learned"),
  [
    (learner(), "output", np.log),
    (
      FastKVzipLearner(group=2, learning_rate=0.2, batch=9, seed=0),
      "attention",
      np.asarray,
    ),
  ],
  ids=["kvzap", "fast_kvzip"],
)
def test_what_is_learned_of_scores_is_written(
  made, weight, learned, tiny, tmp_path
):
  request = kvjax.RepeatRequest.of(tiny.text)
  row = [*request.prefix, *range(20, 50)]
  path = tmp_path / "text.safetensors"
  path.write_bytes(examples.make(tiny, row, 64, 100, 0, made))
  prompts = kvjax.Prompts.of([row], 64, repeat_request=request)
  replay = Replay(chunk=64, weight=weight, of_text=True)
  found = replay_targets(tiny.model, tiny.params, prompts, replay)
  for index, targets in enumerate(found.values()):
    scores = np.asarray(targets.scores)[0, :, len(request.prefix) : len(row)]
    written = examples.pairs_of([path], index).targets
    np.testing.assert_allclose(written, learned(scores).T, rtol=1e-5)


def test_parts_follow_the_template_and_are_of_about_equal_length(tiny):
  prefix = kvjax.RepeatRequest.of(tiny.text).prefix
  texts = ["".join(np.random.default_rng(n).choice(WORDS, 90)) for n in (1, 2)]
  rows = examples.rows_of([*texts, "short"], tiny.text, 40, 100)
  assert {tuple(row[: len(prefix)]) for row in rows} == {tuple(prefix)}
  lengths = [len(row) - len(prefix) for row in rows]
  assert max(lengths) <= 40
  assert min(lengths) >= 20
  joined = [token for row in rows for token in row[len(prefix) :]]
  assert joined == [t for text in texts for t in tiny.text.encode(text)]
  few = examples.rows_of(texts, tiny.text, 40, 3)
  assert few == [rows[0], rows[(len(rows) - 1) // 2], rows[-1]]
  with pytest.raises(InputError, match="have 0 parts of 20 tokens or more"):
    examples.rows_of(["short"], tiny.text, 40, 100)


@pytest.fixture(scope="module")
def run(run_binary, tiny_directory, folder):
  def start(output, *arguments):
    return run_binary(
      MODULE,
      f"--model={tiny_directory}",
      f"--documents={folder}",
      f"--output={output}",
      "--length=60",
      "--tokens=30",
      "--epochs=3",
      *arguments,
    )

  return start


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
  output = tmp_path_factory.mktemp("trained") / "results" / "gate"
  done = run(output)
  assert done.returncode == 0, done.stderr
  return output, done


def test_what_is_trained_is_a_method(trained, tiny):
  output, done = trained
  names = {path.name for path in output.iterdir()}
  assert names == {
    *("config.json", "model.safetensors", "validation.json", "run.json")
  }
  assert "layer 1: R2" in done.stdout
  assert str(output) in done.stdout
  config = json.loads((output / "config.json").read_text())
  assert config["input_dim"] == 32
  assert config["hidden_dim"] == 4
  assert config["n_modules"] == 2
  low, high = config["score_range"]
  assert low < high
  prompts = kvjax.Prompts.of([list(range(3, 200))])
  name = f"kvzap:gate={output}:level=head"
  threshold = kvjax.Threshold((low + high) / 2, 8)
  for budget, most in ((kvjax.Tokens(9), 9), (threshold, 197)):
    plan = kvjax.get_plan(name, budget)
    cache, _ = kvjax.prefill(tiny.model, tiny.params, prompts, plan)
    assert cache.lengths.max() <= most


class StopError(Exception):
  """Stands for a signal."""


def test_a_stopped_run_goes_on_to_the_same_weights(
  tiny, folder, tmp_path, caplog
):
  """It neither replays a text twice nor fits a layer again."""
  texts = documents.read(folder)
  rows = examples.rows_of(texts, tiny.text, 60, 100)
  calls = []

  def counted(function, stops_at):
    def call(*arguments):
      if len(calls) == stops_at:
        raise StopError
      calls.append(function.__name__)
      return function(*arguments)

    return call

  def run(name, stops_at=None):
    calls.clear()
    caplog.clear()
    output = tmp_path / name
    made = Trainer(output, tiny, rows, 30, learner(epochs=3), {})
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(examples, "make", counted(examples.make, stops_at))
      patch.setattr(KVzapLearner, "fit", counted(KVzapLearner.fit, stops_at))
      with caplog.at_level("INFO", "absl"):
        return made.run()

  whole = run("whole")
  everything = ["make"] * len(rows) + ["fit"] * 2
  assert calls == everything
  for stops_at in (2, len(rows), len(rows) + 1):
    name = f"stopped at {stops_at}"
    with pytest.raises(StopError):
      run(name, stops_at)
    assert calls == everything[:stops_at]
    assert not (tmp_path / name / "config.json").exists()
    noted = tmp_path / name / ".train_gate" / "processes.json"
    earlier = json.loads(noted.read_text())
    earlier["processes"][0]["seconds"]["total"] += 1e4
    noted.write_text(json.dumps(earlier))
    found = run(name)
    assert found["seconds"] > 1e4
    assert calls == everything[stops_at:]
    parts = min(stops_at, len(rows))
    assert f"{name}/.train_gate has {parts} replayed parts" in caplog.text
    assert caplog.text.count("Replayed part") == len(rows) - parts
    assert caplog.text.count("Fitted and wrote") == 2 - (stops_at - parts)
    assert found["r2"] == whole["r2"]
    first, second = (
      safetensors.numpy.load_file(tmp_path / n / "model.safetensors")
      for n in ("whole", name)
    )
    assert first.keys() == second.keys()
    for tensor, array in first.items():
      np.testing.assert_array_equal(array, second[tensor])
  assert run("whole") == whole
  assert calls == []


def test_a_folder_is_of_one_run(trained, run, tmp_path):
  output, _ = trained
  again = run(output)
  assert again.returncode == 0, again.stderr
  assert "layer 1" not in again.stdout
  assert "R2 is" in again.stdout
  other = run(output, "--seed=1")
  assert other.returncode == 2
  assert "holds a run with seed 0" in other.stderr


@pytest.fixture(scope="module")
def rows(tiny, folder):
  return examples.rows_of(documents.read(folder), tiny.text, 60, 100)[:2]


def test_a_users_own_files_stay(tiny, rows, tmp_path):
  def train():
    return Trainer(tmp_path, tiny, rows, 30, learner(epochs=1), {})

  own = [tmp_path / name for name in ("examples", "layers", ".train_gate")]
  for inside in own:
    inside.mkdir()
    (inside / "mine.txt").write_text("mine")
  with pytest.raises(InputError, match="is of no run"):
    train()
  assert {*tmp_path.iterdir()} == {*own}
  (own[2] / "mine.txt").unlink()
  own[2].rmdir()
  made = train()
  # In the run's own folder, too.
  own[2].mkdir()
  (own[2] / "mine.txt").write_text("mine")
  made.run()
  for inside in own:
    assert [path.name for path in inside.iterdir()] == ["mine.txt"]


def test_a_run_is_done_once_all_of_its_files_are_there(tiny, rows, tmp_path):
  def run():
    return Trainer(tmp_path, tiny, rows, 30, learner(epochs=1), {}).run()

  first = run()
  written = {path.name for path in tmp_path.iterdir()}
  for name in ("config.json", "model.safetensors"):
    (tmp_path / name).unlink()
    assert run()["r2"] == first["r2"]
    assert {path.name for path in tmp_path.iterdir()} == written
  # A signal may come before the folder is removed.
  work = tmp_path / ".train_gate"
  work.mkdir()
  for name in ("text-000001.safetensors", ".layer-0000.safetensors.part"):
    (work / name).write_text("")
  run()
  assert not work.exists()


@pytest.mark.parametrize(
  "content", [b"", b"x" * 99, b"\x02" + bytes(7) + b"{}"]
)
@pytest.mark.parametrize("name", ["text-000000", "layer-0000"])
def test_files_that_no_run_has_written(tiny, rows, tmp_path, name, content):
  made = Trainer(tmp_path, tiny, rows, 30, learner(epochs=1), {})
  work = tmp_path / ".train_gate"
  work.mkdir()
  path = work / f"{name}.safetensors"
  path.write_bytes(content)
  with pytest.raises(InputError, match=f"{name}.* is not what a run writes"):
    made.run()
  assert path.read_bytes() == content
  assert not (tmp_path / "config.json").exists()
  path.unlink()
  made.run()
  (tmp_path / "validation.json").write_text("[")
  with pytest.raises(InputError, match=r"validation\.json is not valid JSON"):
    made.run()


def test_a_linear_map_is_trained_too(run, tmp_path):
  done = run(tmp_path / "linear", "--kind=linear", "--samples=3")
  assert done.returncode == 0, done.stderr
  gate = KVzapGate.read(str(tmp_path / "linear"))
  assert [w.shape for w, _ in gate.steps] == [(2, 2, 32)]


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    ([], "Name a folder"),
    (["--documents=nowhere"], "nowhere is no folder"),
    (["--documents=.", "--data=."], "do not go together"),
    (["--documents=.", "--output=a:b"], "without colons and commas"),
    (["--documents=.", "--kind=linear", "--hidden=3"], "no hidden layer"),
    (["--documents=.", "--learning_rate=2"], "above 0 and at most 1"),
    (["--documents=docs", "--length=4000"], "is too long to be read twice"),
  ],
)
def test_what_is_wrong_is_one_sentence(
  refusal, tiny_directory, arguments, sentence, tmp_path
):
  if "output" not in str(arguments):
    arguments = [*arguments, f"--output={tmp_path / 'out'}"]
  assert sentence in refusal(MODULE, f"--model={tiny_directory}", *arguments)
  assert not (tmp_path / "out").exists()


def test_it_is_a_program():
  assert MODULE.rpartition(".")[2] in PROGRAMS
