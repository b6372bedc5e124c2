"""Learned gates score and keep what kvpress 0.5.5 does, from the same files.

The files were written by transformers and torch, as the published ones are; see
make_kvpress_gates.py.
"""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine.forward import (
  attend_to_prompt,
  block_positions,
  hidden_states,
)
from kvjax.errors import InputWarning
from kvjax.models.pretrained import load
from kvjax.testing import kept_positions

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "kvpress_gates"
NAME = "small"
LENGTHS = (77, 201)
PERCENTS = (30, 75)
WINDOW = 19
METHODS = {
  "kvzap_linear": f"kvzap.kvpress:gate={FOLDER / 'kvzap_linear'}",
  "kvzap_mlp": f"kvzap.kvpress:gate={FOLDER / 'kvzap_mlp'}",
  "fast_kvzip": f"fast_kvzip.kvpress:gate={FOLDER / 'fast_kvzip'}",
}


def _builder():
  spec = importlib.util.spec_from_file_location(
    "tiny_llama", GOLDEN / "tiny_llama.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


tiny_llama = _builder()
ROWS = [tiny_llama.prompt(NAME, n) for n in LENGTHS]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
  folder = tmp_path_factory.mktemp(NAME)
  tiny_llama.write(NAME, folder)
  return load(folder, dtype="float32")


@pytest.fixture(scope="module")
def stored():
  with np.load(FOLDER / "kept.npz") as arrays:
    return dict(arrays)


@functools.partial(jax.jit, static_argnums=(0, 3))
def layer_activations(model, params, tokens, length):
  """The activations of all layers of one row."""
  positions = block_positions(
    jnp.zeros(1, jnp.int32), length, jnp.full(1, length, jnp.int32)
  )

  def attend(layer, state, activations):
    del layer, state
    return attend_to_prompt(activations), activations

  layers = model.geometry.num_layers
  return hidden_states(
    model, params, tokens, positions, [None] * layers, attend
  )[1]


@pytest.mark.parametrize("press", METHODS)
def test_gates_score_what_kvpress_scores(press, lm, stored):
  method = kvjax.get_method(METHODS[press])
  for ids in ROWS:
    length = len(ids)
    theirs = stored[f"{press}/{length}/scores"]
    found = layer_activations(lm.model, lm.params, jnp.asarray([ids]), length)
    for layer, activations in enumerate(found):
      cache = LayerCache.of(activations)
      with jax.default_matmul_precision("highest"):
        ours = method.scores(jnp.int32(layer), cache, activations)[0]
      protected = method.protected(cache, jnp.full((1, 1), length))[0]
      ours = np.where(protected, 1.0, ours) if press == "fast_kvzip" else ours
      np.testing.assert_allclose(ours, theirs[layer], rtol=1e-4, atol=1e-4)


def kept_bits(cache, row, length):
  """The tokens that a row holds, bool [L, K, n]."""
  layers = kept_positions(cache, row)
  bits = np.zeros((len(layers), len(layers[0]), length), bool)
  for layer, heads in enumerate(layers):
    for head, places in enumerate(heads):
      bits[layer, head, places] = True
  return bits


def assert_same(ours, theirs, ids, case):
  """Equal, but for equal tokens in the first layer."""
  np.testing.assert_array_equal(ours[1:], theirs[1:], err_msg=case)
  ids = np.array(ids)
  for mine, other in zip(ours[0], theirs[0], strict=True):
    left, right = mine & ~other, other & ~mine
    assert sorted(ids[left]) == sorted(ids[right]), case


@pytest.mark.parametrize("press", [*METHODS, "fast_kvzip:level=layer"])
def test_gates_keep_what_kvpress_keeps(press, lm, stored):
  name, _, options = press.partition(":")
  method = f"{METHODS[name]}:{options}" if options else METHODS[name]
  spread = "" if name == "fast_kvzip" else "ada.kvpress/"
  plans = [
    kvjax.get_plan(spread + method, kvjax.Retention(1 - percent / 100))
    for percent in PERCENTS
  ]
  caches, _ = kvjax.sweep(lm.model, lm.params, kvjax.Prompts.of(ROWS), plans)
  for percent, cache in zip(PERCENTS, caches, strict=True):
    for row, ids in enumerate(ROWS):
      case = f"{press}/{len(ids)}/{percent}"
      theirs = np.unpackbits(stored[case], axis=-1, count=len(ids))
      assert 0 < theirs.mean() < 1
      assert_same(
        kept_bits(cache, row, len(ids)), theirs.astype(bool), ids, case
      )


@pytest.mark.parametrize("press", ["kvzap_linear", "kvzap_mlp"])
def test_thresholds_keep_what_dms_keeps(press, lm, stored):
  """Equal tokens have equal scores in layer 0; all or none of them are kept."""
  compared = 0
  for ids in ROWS:
    start = f"{press}/{len(ids)}/"
    for case, packed in stored.items():
      if not case.startswith(start) or "." not in case.removeprefix(start):
        continue
      least = float(case.removeprefix(start))
      # kvpress writes no range of scores.
      with pytest.warns(InputWarning, match="Nothing says which scores"):
        plan = kvjax.get_plan(METHODS[press], kvjax.Threshold(least, WINDOW))
      cache, _ = kvjax.prefill(
        lm.model, lm.params, kvjax.Prompts.of([ids]), plan
      )
      theirs = np.unpackbits(packed, axis=-1, count=len(ids)).astype(bool)
      assert 0.15 < theirs.mean() < 0.9
      ours = kept_bits(cache, 0, len(ids))
      np.testing.assert_array_equal(ours, theirs, err_msg=case)
      compared += 1
  assert compared == 4
