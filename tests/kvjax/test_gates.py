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
from made_up_gates import kvzap_tensors, write_kvzap

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
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
  cache = prefill(f"kvzap:gate={path}", kvjax.Tokens(9))
  shared = prefill(f"ada/kvzap:gate={path}:alpha=0", kvjax.Tokens(9))
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


def refused(name, match, budget=SEVEN, **options):
  with pytest.raises(InputError, match=re.escape(match)) as error:
    prefill(name, budget, **options)
  assert str(error.value).count(". ") == 0


def test_files_that_do_not_fit_are_refused_in_one_sentence(tmp_path):
  refused("kvzap", "give their folder, as in kvzap:gate=DIR")
  refused(f"kvzap:gate={tmp_path / 'none'}", "cannot be read: No such file")

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
      "reads the inputs of layers, which no cache stores",
      schedule=schedule,
    )
