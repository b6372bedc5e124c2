"""Learned gates: their formulas in float64, their files, what they keep."""

import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from made_up_gates import (
  fast_kvzip_layers,
  kvzap_tensors,
  torch_bytes,
  write_fast_kvzip,
  write_kvzap,
)

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine import compress
from kvjax.engine import evaluate as evaluating
from kvjax.errors import InputError
from kvjax.methods import FastKVzip
from kvjax.methods.kvzap_gate import KVzapGate
from kvjax.testing import TinyModel, kept_positions
from kvjax.testing.checks import all_activations

MODEL = TinyModel()
PARAMS = MODEL.init()
LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 32
ROWS = [
  np.random.default_rng(n).permutation(64)[:n].tolist() for n in (61, 40, 17)
]
SEVEN = kvjax.Tokens(7)
HIDDEN = {"linear": None, "mlp": 5}


def scores(method, activations, layer=1):
  with jax.default_matmul_precision("highest"):
    found = method.scores(
      jnp.int32(layer), LayerCache.of(activations), activations
    )
  return np.asarray(found, np.float64)


def wide(array):
  return np.asarray(array, np.float64)


def exact_gelu(x):
  return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def kvzap_in_float64(tensors, layer, inputs):
  """[S, K], by the names of the published files."""
  w = {name: wide(x) for name, x in tensors.items()}
  at = f"layers.{layer}"
  if f"{at}.weight" in w:
    return inputs @ w[f"{at}.weight"].T + w[f"{at}.bias"]
  hidden = exact_gelu(inputs @ w[f"{at}.0.weight"].T + w[f"{at}.0.bias"])
  return hidden @ w[f"{at}.2.weight"].T + w[f"{at}.2.bias"]


@pytest.mark.parametrize("kind", HIDDEN)
def test_kvzap_is_the_published_network(kind, tmp_path):
  path = write_kvzap(tmp_path / kind, 24, 3, LAYERS, HIDDEN[kind])
  method = kvjax.get_method(f"kvzap:gate={path}")
  seen = all_activations(0, [23, 9], 25)
  inputs = wide(seen.inputs)
  tensors = kvzap_tensors(24, 3, LAYERS, HIDDEN[kind])
  for layer in range(LAYERS):
    found = scores(method, seen, layer)
    for row, length in enumerate((23, 9)):
      expected = kvzap_in_float64(tensors, layer, inputs[row, :length])
      np.testing.assert_allclose(
        found[row, :, :length].T, expected, rtol=1e-5, atol=1e-5
      )
  # A head of its own for each query takes the score of its group.
  six = scores(method, seen.with_kv_heads(6))
  np.testing.assert_array_equal(
    six[0, :, :23], scores(method, seen)[0].repeat(2, 0)[:, :23]
  )


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_is_written_is_read(kind, tmp_path):
  path = write_kvzap(tmp_path / "theirs", WIDTH, KV_HEADS, LAYERS, HIDDEN[kind])
  gate = KVzapGate.read(path)
  ours = tmp_path / "ours"
  ours.mkdir()
  gate.save(ours)
  one, other = (
    safetensors.numpy.load_file(pathlib.Path(folder) / "model.safetensors")
    for folder in (path, ours)
  )
  assert one.keys() == other.keys()
  for name, array in one.items():
    np.testing.assert_array_equal(array, other[name])
  fields = [
    json.loads((pathlib.Path(folder) / "config.json").read_text())
    for folder in (path, ours)
  ]
  sizes = ("input_dim", "output_dim", "hidden_dim", "n_modules", "model_type")
  assert [fields[0][n] for n in sizes] == [fields[1][n] for n in sizes]
  assert gate.score_range == (-math.inf, math.inf)


def prefill(name, budget, rows=ROWS, **options):
  plan = kvjax.get_plan(name, budget, **options)
  return kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(rows), plan)[0]


def best(values, count):
  return sorted(np.argsort(-values, kind="stable")[:count].tolist())


def test_the_engine_keeps_the_best_by_the_layers_inputs(tmp_path):
  path = write_kvzap(tmp_path, WIDTH, KV_HEADS, LAYERS, 5)
  alike = f"kvzap:gate={path}:level=head"
  cache = prefill(alike, kvjax.Tokens(9))
  names = (f"ada/{alike}:alpha=0", f"kvzap:gate={path}:level=layer")
  shared, layered = (prefill(name, kvjax.Tokens(9)) for name in names)
  tensors = kvzap_tensors(WIDTH, KV_HEADS, LAYERS, 5)
  # The tiny model has no norm, so that layer 0 reads the embedding.
  embedding = wide(PARAMS["embedding"])
  for row, tokens in enumerate(ROWS):
    found = kvzap_in_float64(tensors, 0, embedding[tokens]).T
    expected = [best(head, 9) for head in found]
    assert kept_positions(cache, row)[0] == expected
    together = best(found.ravel(), 9 * KV_HEADS)
    expected = [
      [p % len(tokens) for p in together if p // len(tokens) == head]
      for head in range(KV_HEADS)
    ]
    assert kept_positions(shared, row)[0] == expected
    assert kept_positions(layered, row) == kept_positions(shared, row)


def refused(name, match, budget=SEVEN, **options):
  with pytest.raises(InputError, match=re.escape(match)) as error:
    prefill(name, budget, **options)
  assert str(error.value).count(". ") == 0


def test_files_that_do_not_fit_are_refused_in_one_sentence(tmp_path):
  refused("kvzap", "give their folder, as in kvzap:gate=DIR")
  refused(f"kvzap:gate={tmp_path / 'none'}", "cannot be read: No such file")
  refused(f"kvzap:gate={'x' * 300}", "cannot be read: File name too long")

  def folder(name, *sizes, **fields):
    return pathlib.Path(write_kvzap(tmp_path / name, *sizes, **fields))

  for name, sizes, match in (
    ("deep", (WIDTH, KV_HEADS, 3), "scores 2 KV heads in 3 layers, and this"),
    ("heads", (WIDTH, 3, LAYERS), "this model has 2 KV heads in 2 layers"),
    ("wide", (8, KV_HEADS, LAYERS), "reads inputs of 8 numbers, and this"),
  ):
    path = folder(name, *sizes)
    refused(f"kvzap:gate={path}", f"{path} is of another model: it")
    refused(f"kvzap:gate={path}", match)
  fit = (WIDTH, KV_HEADS, LAYERS)
  for name, fields, match in (
    ("sizes", {"n_modules": 0}, "must have input_dim, output_dim, n_modules"),
    ("more", {"n_modules": 3}, "has no layers.2.weight, which"),
    ("other", {"hidden_dim": 4}, "has no layers.0.0.weight, which"),
    ("shape", {"output_dim": 3}, "must be finite numbers (3, 32), as"),
    ("range", {"score_range": [1]}, "must be the lowest and the highest"),
    ("turned", {"score_range": [5, -5]}, "must be the lowest and the highest"),
    ("nan", {"score_range": [math.nan, 0]}, "must be the lowest and the"),
    (
      "inf",
      {"score_range": [0, math.inf]},
      "the highest score, finite numbers",
    ),
  ):
    refused(f"kvzap:gate={folder(name, *fit, **fields)}", match)
  broken = folder("broken", *fit)
  (broken / "config.json").write_text("{")
  refused(f"kvzap:gate={broken}", "is not valid JSON")
  text = folder("text", *fit)
  (text / "model.safetensors").write_text("no tensors")
  refused(f"kvzap:gate={text}", "is no file of safetensors")
  odd = folder("odd", *fit)
  tensors = kvzap_tensors(*fit)
  tensors["layers.1.bias"][0] = np.nan
  safetensors.numpy.save_file(tensors, odd / "model.safetensors")
  refused(f"kvzap:gate={odd}", "must be finite")
  path = folder("fits", *fit)
  for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=8)):
    refused(
      f"kvzap:gate={path}",
      "its heads share a budget once the prompt is known",
      schedule=schedule,
    )


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors"])
def test_a_folder_that_has_changed_is_read_again(changed, tmp_path):
  sizes = (WIDTH, KV_HEADS, LAYERS)
  path = write_kvzap(tmp_path, *sizes, score_range=[-9, -1])
  plan = kvjax.get_plan(f"kvzap:gate={path}", SEVEN)
  prompts = kvjax.Prompts.of(ROWS)

  def kept(plan):
    cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
    return [kept_positions(cache, row) for row in range(len(ROWS))]

  before = kept(plan)
  read = KVzapGate.read(path)
  assert read.score_range == (-9, -1)
  assert KVzapGate.read(path) is read
  if changed == "config.json":
    config = (tmp_path / changed).read_text()
    (tmp_path / changed).write_text(config.replace("-9", "-19"))
  else:
    safetensors.numpy.save_file(
      kvzap_tensors(*sizes, seed=5), tmp_path / changed
    )
  assert KVzapGate.read(path) is not read
  if changed == "config.json":
    assert KVzapGate.read(path).score_range == (-19, -1)
    return
  # Also by a plan that was made before it.
  elsewhere = write_kvzap(tmp_path / "new", *sizes)
  safetensors.numpy.save_file(
    kvzap_tensors(*sizes, seed=5), tmp_path / "new" / changed
  )
  fresh = kept(kvjax.get_plan(f"kvzap:gate={elsewhere}", SEVEN))
  assert kept(plan) == fresh != before


def fast_in_float64(weights, inputs):
  """[K, S], as the paper writes it, one token at a time."""
  w = {name: wide(x) for name, x in weights.items()}
  heads, _, group = w["b"].shape
  size = len(w["q_norm.weight"])

  def norm(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain

  scores = np.zeros((heads, len(inputs)))
  for token, x in enumerate(inputs):
    q = (w["q_proj.weight"] @ x + w["q_proj.bias"]).reshape(heads, group, size)
    k = (w["k_proj.weight"] @ x).reshape(heads, size)
    q, k = norm(q, w["q_norm.weight"]), norm(k, w["k_norm.weight"])
    for head in range(heads):
      for g in range(group):
        own = q[head, g] @ k[head] / math.sqrt(size) + w["b"][head, 0, g]
        others = w["k_base"][head, 0] @ q[head, g] / math.sqrt(size)
        scores[head, token] += 1 / (1 + np.exp(others - own).sum()) / group
  return scores


FAST = {"inputs": 24, "heads": 3, "layers": LAYERS}


def fast_scores(tmp_path, change=lambda weights: None):
  """Scores of layer 1 with changed weights, [K, S], and the weights."""
  layers = fast_kvzip_layers(**FAST)
  for weights in layers:
    change(weights)
  path = tmp_path / f"{len([*tmp_path.iterdir()])}.pt"
  path.write_bytes(torch_bytes({"module": layers}))
  seen = all_activations(0, [23], 25)
  found = scores(FastKVzip(str(path)), seen)[0, :, :23]
  return found, fast_in_float64(layers[1], wide(seen.inputs)[0, :23])


def test_fast_kvzip_is_attention_beside_learned_keys(tmp_path):
  found, expected = fast_scores(tmp_path)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert expected.std() > 0.1

  def swap(weights):
    size, group = 4, 2
    for name in ("q_proj.weight", "q_proj.bias"):
      rows = weights[name].reshape(3, group, size, -1)[:, ::-1]
      weights[name] = np.ascontiguousarray(rows).reshape(weights[name].shape)
    weights["b"] = np.ascontiguousarray(weights["b"][..., ::-1])

  # The queries of a group have no order.
  swapped, _ = fast_scores(tmp_path, swap)
  np.testing.assert_allclose(swapped, found, rtol=1e-5)


def test_fast_kvzip_lets_everything_through_or_nothing(tmp_path):
  for bias, expected in ((300.0, 1.0), (-300.0, 0.0)):

    def change(weights, bias=bias):
      weights["b"] = np.full_like(weights["b"], bias)

    found, _ = fast_scores(tmp_path, change)
    np.testing.assert_array_equal(found, expected)


def test_fast_kvzip_shares_a_budget_over_the_model(tmp_path):
  path = write_fast_kvzip(tmp_path / "gate.pt", WIDTH, KV_HEADS, LAYERS)
  budget = kvjax.Retention(0.25)
  cache = prefill(f"fast_kvzip:gate={path}:recent=0.1:sinks=3", budget)
  by_layer = prefill(f"fast_kvzip:gate={path}:level=layer", budget)
  counts = np.asarray(cache.lengths)
  assert len({*counts[:, 0].ravel().tolist()}) > 2
  for row, tokens in enumerate(ROWS):
    kept = budget.num_kept(len(tokens))
    assert counts[:, row].sum() == LAYERS * KV_HEADS * kept
    layers = np.asarray(by_layer.lengths)[:, row].sum(axis=1)
    np.testing.assert_array_equal(layers, KV_HEADS * kept)
    last = max(1, len(tokens) // 10)
    stays = {0, 1, 2, *range(len(tokens) - last, len(tokens))}
    for layer in kept_positions(cache, row):
      for head in layer:
        assert stays <= {*head} or len(stays) > kept


def test_a_long_prompt_keeps_a_window():
  method = FastKVzip(recent=0.02, window=4096, sinks=4)
  for length, last in ((49, 1), (350, 7), (31_999, 639), (32_000, 4096)):
    positions = jnp.arange(length, dtype=jnp.int32)[None, None]
    keys = jnp.zeros((1, 1, length, 1))
    cache = LayerCache(keys, keys, positions, jnp.int32(length))
    found = np.asarray(method.protected(cache, jnp.ones((1, 1), jnp.int32)))
    expected = [*range(4), *range(length - last, length)]
    np.testing.assert_array_equal(np.flatnonzero(found[0, 0]), expected)


def test_files_of_fast_kvzip_that_do_not_fit_are_refused(tmp_path):
  refused("fast_kvzip", "give their file, as in fast_kvzip:gate=FILE")
  refused(f"fast_kvzip:gate={tmp_path}", "has 0 files named *.pt")
  refused("fast_kvzip:gate=nowhere.pt", "cannot be read: No such file")
  refused(f"fast_kvzip:gate={'x' * 300}", "cannot be read: File name too long")
  number = iter(range(99))

  def written(content):
    path = tmp_path / f"{next(number)}.pt"
    path.write_bytes(content)
    return f"fast_kvzip:gate={path}"

  def changed(**changes):
    layers = fast_kvzip_layers(WIDTH, KV_HEADS, LAYERS)
    for layer in layers:
      layer |= {name.replace("_w", ".w"): x for name, x in changes.items()}
    return written(torch_bytes({"module": layers}))

  for sizes, match in (
    ((WIDTH, KV_HEADS, 3), "it scores 2 KV heads in 3 layers, and this model"),
    ((WIDTH, 3, LAYERS), "this model has 2 KV heads in 2 layers"),
    ((8, KV_HEADS, LAYERS), "it reads inputs of 8 numbers, and this model's"),
  ):
    path = tmp_path / f"{next(number)}.pt"
    refused(f"fast_kvzip:gate={write_fast_kvzip(path, *sizes)}", match)
  refused(written(b"no zip"), "is no file that torch.save has written")
  refused(written(torch_bytes([1])), "has no list of layers named module")
  refused(written(torch_bytes({"module": [{}]})), "q_proj.weight of")
  refused(changed(b=np.full((2, 1, 2), np.nan, np.float32)), "must be finite")
  refused(changed(b=np.ones((2, 1, 3), np.float32)), "q_proj.weight of")
  # Without learned keys, every score would be 1.
  none = np.zeros((KV_HEADS, 1, 0, 4), np.float32)
  refused(changed(k_base=none), "k_base of")
  many = fast_kvzip_layers(WIDTH, KV_HEADS, LAYERS)[:1] * 10_000
  refused(written(torch_bytes({"module": many})), "than the file holds")
  good = torch_bytes({"module": fast_kvzip_layers(WIDTH, KV_HEADS, LAYERS)})
  refused(written(good[: len(good) // 2]), "is no file that torch.save")


def test_programs_have_no_weights_and_gates_of_one_size_share_them(
  tmp_path, monkeypatch
):
  """Of an 8B model, a gate has hundreds of megabytes."""
  paths = [
    write_kvzap(tmp_path / name, WIDTH, KV_HEADS, LAYERS, 300)
    for name in ("one", "other")
  ]
  tensors = kvzap_tensors(WIDTH, KV_HEADS, LAYERS, 300, seed=1)
  other = tmp_path / "other" / "model.safetensors"
  safetensors.numpy.save_file(tensors, other)
  lowered, evaluate = [], compress.evaluate_layer
  methods = []

  def watched(evaluation, *arguments, scored):
    methods.append(evaluation.method)
    lowered.append(evaluate.lower(evaluation, *arguments, scored=scored))
    return evaluate(evaluation, *arguments, scored=scored)

  monkeypatch.setattr(evaluating, "evaluate_layer", watched)
  plans = [kvjax.get_plan(f"kvzap:gate={path}", SEVEN) for path in paths]
  jax.clear_caches()
  kept = []
  for plan in plans:
    cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
    kept.append([kept_positions(cache, row) for row in range(len(ROWS))])
  assert kept[0] != kept[1]
  assert len({*methods}) == 1
  assert evaluate._cache_size() == 1
  for each in lowered:
    assert len(each.as_text()) < 60_000, "weights are arguments"
    assert f"tensor<{LAYERS}x300x{WIDTH}xf32>" in each.as_text()
