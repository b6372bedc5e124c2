"""Documents become chunks, chunks a loss, a stopped run the same model."""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from flax import nnx

import kvjax
from kvjax import models
from kvjax.cache.layers import LayerCache
from kvjax.cache.sharding import parse_mesh
from kvjax.engine.forward import hidden_states
from kvjax.errors import InputError
from kvjax.experiments.finetuning import documents, training, tuner
from kvjax.experiments.finetuning.tuner import Recipe, Tuner
from kvjax.experiments.reference import vocabulary
from kvjax.kernels.attention import attention
from kvjax.models import lora
from kvjax.models.decoder import Decoder
from kvjax.models.language_model import from_decoder
from kvjax.models.pretrained import load_decoder
from kvjax.models.sharding import param_shardings
from kvjax.models.tokenizer import Tokenizer
from kvjax.prompts import Prompts

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
TEXT = "The first file is read when the second one has been closed."
RECIPE = Recipe(2, ("q", "v"), 2, 1e-2, 2, 0)
SCHEDULE = training.Schedule(1e-2, 4)
ROWS = ([5, 6, 7, 8, 5, 6, 7], [9, 8, 7], [4, 9, 4, 9, 4])
PARTS = Prompts.of(ROWS, training.QUERIES)


@pytest.fixture
def folder(tmp_path):
  inner = tmp_path / "documents" / "inner"
  inner.mkdir(parents=True)
  (inner / "b.md").write_text(f"# A title\n\n{TEXT}", encoding="utf-8")
  (inner.parent / "a.txt").write_text(TEXT * 2, encoding="utf-8")
  (inner.parent / "empty.txt").write_text("\n")
  (inner.parent / "c.json").write_text('"not a document"')
  return inner.parent


def test_texts_are_read_in_order(folder):
  assert documents.read(folder) == [TEXT * 2, f"# A title\n\n{TEXT}"]


def test_contexts_of_longbench_are_documents(tmp_path):
  for name in ("hotpotqa", "qasper", "trec"):
    rows = [
      {"context": f"{name} {number}", "input": "Why?", "answers": ["So."]}
      for number in range(3)
    ]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / f"{name}.jsonl").write_text(lines)
  found = documents.read_longbench(tmp_path, ["qasper", "hotpotqa", "lcc"], 2)
  assert found == ["qasper 0", "qasper 1", "hotpotqa 0", "hotpotqa 1"]
  assert len(documents.read_longbench(tmp_path, ["trec"])) == 3


def test_what_is_no_folder_of_texts_is_refused(folder, tmp_path):
  with pytest.raises(InputError, match=r"nothing is no folder; documents are"):
    documents.read(tmp_path / "nothing")
  (tmp_path / "bare").mkdir()
  with pytest.raises(InputError, match=r"bare holds no text in .txt and .md"):
    documents.read(tmp_path / "bare")
  (folder / "d.txt").write_bytes(b"\xff\xfe")
  with pytest.raises(InputError, match=r"d.txt is not text in UTF-8"):
    documents.read(folder)


def test_documents_without_two_tokens_are_refused():
  bare = Tokenizer(vocabulary.build(), {})
  with pytest.raises(InputError, match="too short: none has two tokens"):
    documents.chunks(["a"], bare, 20, 32)


def test_chunks_hold_every_token_once_after_bos(tiny):
  texts = [TEXT * 3, TEXT]
  parts = documents.chunks(texts, tiny.tokenizer, 20, 32)
  rows = parts.rows()
  assert {row[0] for row in rows} == {tiny.tokenizer.bos_id}
  lengths = [len(row) for row in rows]
  assert max(lengths) <= 20
  joined = [token for row in rows for token in row[1:]]
  assert joined == [t for text in texts for t in tiny.tokenizer.encode(text)]
  # None of a text's parts is a mere rest, and no more than needed.
  counts = [tiny.tokenizer.count(text) for text in texts]
  assert len(rows) == sum(math.ceil(count / 19) for count in counts)
  first = lengths[: math.ceil(counts[0] / 19)]
  assert max(first) - min(first) <= 1
  assert parts.tokens.shape[1] % 32 == 0


def test_an_epoch_has_every_chunk_once_and_an_order_of_its_own():
  parts = Prompts.of([[i, i] for i in range(1, 12)])
  assert documents.steps_per_epoch(parts, 4) == 3
  epochs = []
  for epoch in (0, 1):
    batches = [
      documents.batch(parts, 4, step, 7)
      for step in range(3 * epoch, 3 * epoch + 3)
    ]
    assert [len(batch.lengths) for batch in batches] == [4, 4, 4]
    assert batches[-1].lengths.tolist() == [2, 2, 2, 0]
    epochs.append(np.concatenate([b.tokens[:, 0] for b in batches])[:11])
    assert sorted(epochs[-1]) == list(range(1, 12))
  assert (epochs[0] != epochs[1]).any()
  again = documents.batch(parts, 4, 3, 7).tokens[:, 0]
  np.testing.assert_array_equal(again, epochs[1][:4])
  assert documents.digest(parts) != documents.digest(PARTS)


@pytest.fixture
def shallow(tiny):
  """The same sizes in one layer, which is compiled in half the time."""
  config = dataclasses.replace(tiny.config, num_layers=1)
  model, params = from_decoder(Decoder(config, rngs=nnx.Rngs(0)))
  return dataclasses.replace(tiny, model=model, params=params)


def adapted(model, params, targets=("q", "v", "down")):
  """With adapters that already do something."""
  model, params = lora.add_adapters(model, params, 2, targets)
  adapter, frozen = lora.split(params)
  return model, jax.tree.map(lambda x: x + 0.02, adapter), frozen


def plain_loss(model, adapter, frozen):
  """Mean NLL with all logits and all attention weights at once."""

  def attend(layer, state, seen):
    own = LayerCache.of(seen)
    mixed = attention(
      *(seen.queries, own.keys, own.values, seen.positions, own.positions),
      implementation="reference",
    )
    return mixed, state

  params = nnx.merge_state(adapter, frozen)
  total = jnp.zeros(())
  for row in ROWS:
    tokens = jnp.asarray([row], jnp.int32)
    places = jnp.arange(len(row), dtype=jnp.int32)[None]
    none = (None,) * model.geometry.num_layers
    hidden, _ = hidden_states(model, params, tokens, places, none, attend)
    chances = jax.nn.log_softmax(model.logits(params, hidden[0, :-1]))
    picked = jnp.take_along_axis(chances, tokens[0, 1:, None], axis=1)
    total -= jnp.sum(picked)
  return total / sum(len(row) - 1 for row in ROWS)


def padded():
  """The rows with one that does not count."""
  tokens = np.pad(PARTS.tokens, ((0, 1), (0, 0)), constant_values=3)
  return tokens, np.pad(PARTS.lengths, (0, 1))


def test_loss_and_gradient_are_those_of_the_plain_computation(tiny):
  """In two layers: a loop over them, and each written out."""
  model, adapter, frozen = adapted(tiny.model, tiny.params)

  def loss(adapter):
    params = nnx.merge_state(adapter, frozen)
    return training.summed_nll(model, params, *map(jnp.asarray, padded()))

  found, gradient = jax.jit(jax.value_and_grad(loss))(adapter)
  count = sum(len(row) - 1 for row in ROWS)
  plain = jax.jit(jax.value_and_grad(plain_loss, 1), static_argnums=0)
  wanted, plain_gradient = plain(model, adapter, frozen)
  np.testing.assert_allclose(found / count, wanted, rtol=1e-5)
  jax.tree.map(
    lambda one, other: np.testing.assert_allclose(
      one / count, other, rtol=1e-3, atol=1e-6
    ),
    gradient,
    plain_gradient,
  )
  assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("family", ["mistral_window", "granite", "gpt_oss"])
def test_the_loss_is_the_likelihood_of_models_of_every_kind(family):
  """With windows, another scale, attention sinks."""
  model, params = load_decoder(GOLDEN / family, "float32")
  draw = np.random.default_rng(0)
  rows = [draw.integers(3, 80, length).tolist() for length in (70, 30)]
  means = kvjax.negative_log_likelihood(model, params, kvjax.Prompts.of(rows))
  padded = Prompts.of(rows, training.QUERIES)
  found = training.measure(
    model, params, jnp.asarray(padded.tokens), jnp.asarray(padded.lengths)
  )
  expected = np.sum(np.asarray(means) * (padded.lengths - 1))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_is_tuned_in_float32_and_never_holds_all_logits(shallow):
  decoder = Decoder(shallow.config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  model, adapter, frozen = adapted(*from_decoder(decoder), ("v",))
  moments = training.optimizer(SCHEDULE).init(adapter)
  shape = (2, 8 * training.QUERIES)
  lowered = training.train_step.lower(
    *(model, SCHEDULE, adapter, moments, frozen),
    jax.ShapeDtypeStruct(shape, jnp.int32),
    jax.ShapeDtypeStruct(shape[:1], jnp.int32),
  )
  tuned, moments, _ = lowered.out_info
  floats = [x for x in jax.tree.leaves((tuned, moments)) if x.ndim]
  assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
  used = lowered.compile().memory_analysis().temp_size_in_bytes
  assert used < math.prod(shape) * shallow.config.vocab_size * 4


def test_learning_rates_rise_then_fall_to_zero():
  schedule = training.Schedule(0.5, 100)
  rates = [float(schedule.rate(jnp.int32(step))) for step in range(101)]
  np.testing.assert_allclose(rates[0], 0.1, rtol=1e-6)
  np.testing.assert_allclose(rates[50], 0.25, rtol=1e-5)
  assert rates[4] == max(rates) > 0.49
  assert rates[4:] == sorted(rates[4:], reverse=True)
  assert rates[100] == pytest.approx(0, abs=1e-7)
  assert float(training.Schedule(0.5, 1).rate(jnp.int32(0))) == 0.5


def started(output, lm, recipe=RECIPE):
  output.mkdir(exist_ok=True)
  return Tuner(output, lm, PARTS, recipe, {"documents": "abc"})


def log_of(output):
  lines = (output / "log.jsonl").read_text().splitlines()
  return [json.loads(line) | {"seconds": 0} for line in lines]


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(
  shallow, tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(tuner, "_SAVE_EVERY", 3)
  before = jax.tree.map(np.asarray, shallow.params)
  whole = started(tmp_path / "whole", shallow)
  whole.run()
  # Two batches of the three rows make an epoch.
  assert whole.state.total == 4
  assert whole.state.tokens == 2 * sum(len(row) - 1 for row in ROWS)
  jax.tree.map(np.testing.assert_array_equal, before, shallow.params)

  def stopped_at(step, output):
    def stop(*args):
      if run.state.total == step:
        raise KeyboardInterrupt
      return take_step(*args)

    run = started(output, shallow)
    take_step = training.train_step
    with monkeypatch.context() as patched:
      patched.setattr(training, "train_step", stop)
      with pytest.raises(KeyboardInterrupt):
        run.run()

  # Within the first epoch, within the second, after a save in the second; as
  # if it had been killed between a line of the log and its checkpoint, too.
  output = tmp_path / "stopped"
  stopped_at(1, output)
  with (output / "log.jsonl").open("a") as log:
    log.write('{"epoch": 1, "steps": 2, "nll": 0.0}\n{"epoch": 2, "st')
  stopped_at(3, output)
  resumed = started(output, shallow)
  assert resumed.state.total == 3
  logging.set_verbosity(logging.INFO)
  resumed.run()
  logging.set_verbosity(logging.WARNING)
  logged = [record.getMessage() for record in caplog.records]
  assert "Starting after step 3 of 4" in logged
  assert any(line.startswith("The first step, of 2 chunks,") for line in logged)
  assert "Saved a checkpoint after step 4" in logged
  jax.tree.map(
    np.testing.assert_array_equal,
    (whole.state.params, whole.state.moments),
    (resumed.state.params, resumed.state.moments),
  )
  assert log_of(output) == log_of(tmp_path / "whole")
  nll = [line["nll"] for line in log_of(output)]
  assert len(nll) == 3
  assert nll[2] < nll[1] < nll[0]
  # What the log says is the likelihood that calibration asks for.
  found = kvjax.negative_log_likelihood(*resumed.merged(), PARTS)
  foretold = (PARTS.lengths - 1).astype(np.float32)
  np.testing.assert_allclose(
    nll[2], (found * foretold).sum() / foretold.sum(), rtol=1e-5
  )


def test_a_folder_of_another_run_is_refused(shallow, tmp_path):
  started(tmp_path, shallow)
  other = dataclasses.replace(RECIPE, targets=("q",))
  with pytest.raises(
    InputError, match=r"a run with targets \['q', 'v'\], and this one has tar"
  ):
    started(tmp_path, shallow, other)


def test_a_model_that_no_run_has_made_is_not_overwritten(shallow, tmp_path):
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(InputError, match="holds a model, which would be over"):
    started(tmp_path, shallow)
  assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_a_mesh_learns_what_one_device_does(shallow):
  # Shapes of the test before, whose program is there.
  rows = documents.batch(PARTS, RECIPE.batch, 1, 0)
  assert rows.lengths[1] == 0

  def learnt(params):
    model, adapter, frozen = adapted(shallow.model, params, RECIPE.targets)
    moments = training.optimizer(SCHEDULE).init(adapter)
    losses = []
    for _ in range(2):
      adapter, moments, loss = training.train_step(
        model, SCHEDULE, adapter, moments, frozen, *rows
      )
      losses.append(float(loss))
    return losses, adapter

  losses, _ = learnt(shallow.params)
  mesh = parse_mesh("data:2,model:2")
  shardings = param_shardings(shallow.params, shallow.config.geometry, mesh)
  with jax.set_mesh(mesh):
    spread, adapter = learnt(jax.device_put(shallow.params, shardings))
  np.testing.assert_allclose(spread, losses, rtol=1e-5)
  assert losses[1] < losses[0]
  up = adapter["layers"][0]["self_attn"]["q_proj"]["lora_b"][...]
  assert up.addressable_shards[0].data.shape == (1, 2, up.shape[2] // 2)


@pytest.mark.slow
def test_the_program_writes_a_model_that_is_loaded_and_goes_on(
  run_binary, tiny_directory, tiny, folder, tmp_path
):
  def run(*flags):
    return run_binary(
      "kvjax.experiments.finetune",
      f"--model={tiny_directory}",
      f"--output={tmp_path / 'out'}",
      *flags,
    )

  refused = run()
  assert refused.returncode == 2
  assert refused.stderr.startswith("Name a folder of .txt and .md files to ")
  flags = [f"--documents={folder}", "--rank=2", "--epochs=1", "--length=64"]
  refused = run(*flags[:3], "--length=513")
  assert refused.returncode == 2
  assert refused.stderr == (
    "--length=513 is longer than the context of this model, 512 tokens.\n"
  )
  assert not (tmp_path / "out").exists()
  done = run(*flags)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0].startswith("2 documents of ")
  assert lines[2].startswith("epoch 1 of 1: ")
  tuned = models.load(tmp_path / "out", "float32")
  parts = documents.chunks(
    documents.read(folder), tuned.tokenizer, 64, training.QUERIES
  )
  source = json.loads((tmp_path / "out" / "run.json").read_text())
  recipe = Recipe(2, ("q", "k", "v"), 1, source["learning_rate"], 4, 0)
  run_again = Tuner(tmp_path / "out", tiny, parts, recipe, {})
  _, params = run_again.merged()
  jax.tree.map(np.testing.assert_array_equal, tuned.params, params)
  adapter = tmp_path / "out" / "adapter" / "adapter_model.safetensors"
  assert adapter.stat().st_size < 20_000
