"""Newer presets named after kvpress score and keep what kvpress 0.5.5 does.

On random checkpoints, which are built here as they were for kvpress. Rows of 77
and 901 tokens are padded in one batch; kvpress ran each of them alone. In the
first layer, equal tokens may have equal scores: they may be exchanged.
"""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.engine.forward import (
  attend_to_prompt,
  block_positions,
  hidden_states,
)
from kvjax.models.pretrained import load
from kvjax.registry.names import get_recipe
from kvjax.testing import kept_positions

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "kvpress_scorers"
LENGTHS = (77, 901)
LAYER = 1
PERCENTS = (30, 75)
TOLERANCE = 1e-4
# By the name of the press in make_kvpress_scorers.py. FILE stands for the
# file of stored statistics and filters.
_SNAPKV = "snapkv.kvpress:window=5:kernel=3"
_EXPECTED = "expected_attention.kvpress"
COUNTERPARTS = {
  "expected": _EXPECTED,
  "expected_ahead": f"{_EXPECTED}:future=37:sinks=2:epsilon=0.01",
  "expected_mean": f"{_EXPECTED}:covariance=false:value_norm=false",
  "expected_stats": f"{_EXPECTED}:statistics=FILE",
  "ada_expected": f"ada.kvpress/{_EXPECTED}:epsilon=0.01",
  "critical_snapkv": f"critical/{_SNAPKV}",
  "critical_expected": (
    f"critical:epsilon=0.001:first_stage=0.25/{_EXPECTED}:value_norm=false"
  ),
  "critical_ada": f"ada.kvpress/critical/{_SNAPKV}",
  "cur": "cur.kvpress",
  "cur_key": "cur.kvpress:leverage=key:block=7",
  "cur_value": "cur.kvpress:leverage=value:block=0:sinks=1",
  "cur_mean": "cur.kvpress:leverage=mean:sketch=20",
  "q_filters": "qfilters.kvpress:filters=FILE",
}
# One of each kind, on one checkpoint.
QUICK = {"expected", "expected_stats", "critical_ada", "cur", "q_filters"}


def _builder():
  spec = importlib.util.spec_from_file_location(
    "tiny_llama", GOLDEN / "tiny_llama.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


tiny_llama = _builder()


def golden(name):
  return np.load(FOLDER / f"{name}.npz")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """Loads a checkpoint and the file of its statistics, by its name."""

  @functools.cache
  def loaded(name):
    folder = tmp_path_factory.mktemp(name)
    tiny_llama.write(name, folder)
    with golden("statistics") as stored:
      arrays = {
        part: stored[f"{name}/{part}"]
        for part in ("query_mean", "query_cov", "q_filters")
      }
    path = folder / "statistics.safetensors"
    safetensors.numpy.save_file(arrays, path)
    return load(folder, dtype="float32"), path

  return loaded


@pytest.fixture(autouse=True)
def _sketches_of_kvpress(monkeypatch):
  def draw(seed, dim, width):
    del seed
    assert dim == tiny_llama.HEAD_DIM
    return jnp.asarray(tiny_llama.normals(1, width)[0] * width**-0.5)

  monkeypatch.setattr("kvjax.methods.cur.draw_sketch", draw)


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
  states = hidden_states(
    model, params, tokens, positions, [None] * layers, attend
  )[1]
  return states


def scores_of(lm, method, ids, layer):
  found = layer_activations(lm.model, lm.params, jnp.asarray([ids]), len(ids))[
    layer
  ]
  with jax.default_matmul_precision("highest"):
    cache = LayerCache.of(found)
    scores = method.evaluate(jnp.int32(layer), cache, found)
  free = ~method.protected(cache, jnp.full((1, 1), len(ids)))
  return np.asarray(scores[0]), np.asarray(free[0])


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


CASES = [
  pytest.param(
    press,
    name,
    marks=() if press in QUICK and name == "held_out" else pytest.mark.slow,
  )
  for press in COUNTERPARTS
  for name in tiny_llama.SHAPES
]


def named(press, path):
  return COUNTERPARTS[press].replace("FILE", str(path))


@pytest.mark.parametrize(("press", "name"), CASES)
def test_presets_keep_what_kvpress_keeps(press, name, checkpoint):
  lm, path = checkpoint(name)
  rows = [tiny_llama.prompt(name, n) for n in LENGTHS]
  plans = [
    kvjax.get_plan(named(press, path), kvjax.Retention(1 - percent / 100))
    for percent in PERCENTS
  ]
  caches, _ = kvjax.sweep(lm.model, lm.params, kvjax.Prompts.of(rows), plans)
  with golden(name) as stored:
    for percent, cache in zip(PERCENTS, caches, strict=True):
      for row, length in enumerate(LENGTHS):
        case = f"{press}/{length}/{percent}"
        theirs = np.unpackbits(stored[case], axis=-1, count=length)
        ours = kept_bits(cache, row, length)
        assert_same(ours, theirs.astype(bool), rows[row], case)


@pytest.mark.parametrize(("press", "name"), CASES)
def test_presets_score_what_kvpress_scores(press, name, checkpoint):
  if press.startswith("critical"):
    pytest.skip("kvpress's scores have the highest number in the first stage")
  lm, path = checkpoint(name)
  method = get_recipe(named(press, path)).method
  with golden(name) as stored:
    short = stored[f"{press}/{LENGTHS[0]}/scores"]
    long = stored[f"{press}/{LENGTHS[1]}/scores"]
  rows = [tiny_llama.prompt(name, n) for n in LENGTHS]
  pairs = [(rows[0], layer, theirs) for layer, theirs in enumerate(short)]
  for ids, layer, theirs in [*pairs, (rows[1], LAYER, long)]:
    ours, free = scores_of(lm, method, ids, layer)
    assert free.sum() >= free.size - 4 * len(free)
    # Relative to the largest where all are small.
    largest = np.abs(theirs[free]).max()
    np.testing.assert_allclose(
      ours[free], theirs[free], rtol=0, atol=TOLERANCE * min(1.0, largest)
    )


def test_every_golden_is_compared():
  for name in tiny_llama.SHAPES:
    with golden(name) as stored:
      assert {case.split("/")[0] for case in stored.files} == {*COUNTERPARTS}
