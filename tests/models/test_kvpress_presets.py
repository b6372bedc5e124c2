"""Presets named after kvpress keep what kvpress 0.5.5 keeps (tests/golden).

On random checkpoints, which are built here as they were for kvpress. Rows of
unequal lengths are padded in one batch; kvpress ran each of them alone. In the
first layer, equal tokens have equal norms and leverages: they may be exchanged.
"""

import importlib.util
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.pretrained import load
from kvjax.models.saving import save
from kvjax.testing import kept_positions

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "kvpress_presets"
LENGTHS = (170, 197)
LONG = 901
PERCENTS = (30, 50, 90)
# By the name of the press in make_kvpress_presets.py.
COUNTERPARTS = {
  "snapkv": "snapkv.kvpress",
  "knorm": "key_norm.kvpress",
  "keydiff": "keydiff.kvpress",
  "tova": "tova.kvpress",
  "streaming": "streaming.kvpress",
  "observed": "h2o.kvpress",
  "lagkv_cross": "lagkv.kvpress:lag=16:cross_scoring=true",
  "chunkkv_snapkv": "chunkkv.kvpress",
  "chunkkv_snapkv_16": "chunkkv.kvpress:chunk=7/snapkv:window=16:kernel=7",
  "chunkkv_keydiff": "chunkkv.kvpress/keydiff",
  "chunkkv_knorm": "chunkkv.kvpress:chunk=33/key_norm",
  "chunkkv_tova": "chunkkv.kvpress/tova.kvpress",
  "chunkkv_cross": ("chunkkv.kvpress/lagkv.kvpress:lag=16:cross_scoring=true"),
  "chunkkv_leverage": "chunkkv.kvpress/leverage.kvpress:sketch_dim=8",
  "chunkkv_long": "chunkkv.kvpress:chunk=1000/keydiff",
  "ada_snapkv": "adakv.kvpress",
  "ada_snapkv_16": "ada.kvpress/snapkv.kvpress:window=16:alpha=0.6",
  "ada_keydiff": "ada.kvpress/keydiff",
  "ada_knorm": "ada.kvpress:alpha=0.01/key_norm",
  "ada_leverage": "ada.kvpress/leverage.kvpress:sketch_dim=8:alpha=0.5",
  "pyramid": "pyramidkv.kvpress",
  "pyramid_2": "pyramidkv.kvpress:window=8:beta=2",
  "pyramid_16": "pyramid.kvpress:beta=16/snapkv.kvpress:window=4:kernel=3",
  "leverage": "leverage.kvpress",
  "leverage_8": "leverage.kvpress:sketch_dim=8",
  "mended_noncausal": "noncausal.kvpress",
  "mended_noncausal_24": "noncausal.kvpress:chunk=24",
  "chunk_keydiff": "chunked:length=32/keydiff.kvpress",
  "chunk_knorm": "chunked/key_norm.kvpress",
  "chunk_lagkv": (
    "chunked:length=40/lagkv.kvpress:sinks=2:lag=9:cross_scoring=true"
  ),
  "chunk_leverage": "chunked:length=50/leverage.kvpress:sketch_dim=8",
  "mended_chunk_snapkv": ("chunked:length=40/snapkv.kvpress:window=2:kernel=3"),
}
PER_LAYER = {"small": (0.2, 0.75, 0.5, 0.9), "held_out": (0.6, 0.1, 0.85)}
# Windows of presses that keep less than them at a ratio of 0.9.
WINDOWS = {
  "snapkv": 64,
  "ada_snapkv": 64,
  "pyramid": 64,
  "chunkkv_snapkv": 64,
  "chunkkv_snapkv_16": 16,
}
# One of each kind, on one checkpoint.
QUICK = {"chunkkv_snapkv_16", "ada_snapkv_16", "pyramid_16", "chunk_keydiff"}


def _builder():
  spec = importlib.util.spec_from_file_location(
    "tiny_llama", GOLDEN / "tiny_llama.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


tiny_llama = _builder()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
  folder = tmp_path_factory.mktemp("checkpoints")
  for name in tiny_llama.SHAPES:
    tiny_llama.write(name, folder / name)
  return {
    name: load(folder / name, dtype="float32") for name in tiny_llama.SHAPES
  }


@pytest.fixture(autouse=True)
def _sketches_of_kvpress(monkeypatch):
  def draw(kind, key, heads, dim, width):
    assert dim == tiny_llama.HEAD_DIM
    return jnp.asarray(tiny_llama.normals(heads, width) * width**-0.5)

  monkeypatch.setattr("kvjax.methods.leverage_scores.draw_factors", draw)


def golden(name):
  return np.load(FOLDER / f"{name}.npz")


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
  press, length, percent = case.split("/")
  if press in WINDOWS and percent == "90":
    # The window's tokens, or chunks of them, have equal scores, and torch
    # chooses among them.
    assert ours.sum(axis=-1).min() > 0, case
    outside = ours[..., : int(length) - WINDOWS[press]].any()
    assert not outside, case
    assert not theirs[..., : int(length) - WINDOWS[press]].any(), case
    return
  np.testing.assert_array_equal(ours[1:], theirs[1:], err_msg=case)
  ids = np.array(ids)
  for mine, other in zip(ours[0], theirs[0], strict=True):
    left, right = mine & ~other, other & ~mine
    assert sorted(ids[left]) == sorted(ids[right]), case


def compare(lm, name, plans, lengths=LENGTHS):
  """Compares what plans keep with goldens of the same keys.

  Args:
    lm: the checkpoint.
    name: its name.
    plans: by press and percent.
    lengths: lengths of the rows of the batch.
  """
  rows = [tiny_llama.prompt(name, n) for n in lengths]
  prompts = kvjax.Prompts.of(rows)
  caches, _ = kvjax.sweep(lm.model, lm.params, prompts, [*plans.values()])
  with golden(name) as stored:
    for (press, percent), cache in zip(plans, caches, strict=True):
      for row, length in enumerate(lengths):
        case = f"{press}/{length}/{percent}"
        theirs = np.unpackbits(stored[case], axis=-1, count=length)
        ours = kept_bits(cache, row, length)
        assert_same(ours, theirs.astype(bool), rows[row], case)


def percents_of(press):
  """But for ratios at which LagKV's sinks and window do not all fit.

  They have equal scores, and torch chooses among them.
  """
  ties = press in ("lagkv_cross", "chunk_lagkv")
  return [percent for percent in PERCENTS if percent < 90 or not ties]


def plans_of(press):
  return {
    (press, percent): kvjax.get_plan(
      COUNTERPARTS[press], kvjax.Retention(1 - percent / 100)
    )
    for percent in percents_of(press)
  }


@pytest.mark.parametrize(
  ("press", "name"),
  [
    pytest.param(
      press,
      name,
      marks=() if press in QUICK and name == "held_out" else pytest.mark.slow,
    )
    for press in COUNTERPARTS
    for name in tiny_llama.SHAPES
  ],
)
def test_presets_keep_what_kvpress_keeps(press, name, checkpoints):
  compare(checkpoints[name], name, plans_of(press))


@pytest.mark.slow
def test_a_row_alone_keeps_what_it_keeps_in_a_batch(checkpoints):
  """Without padding to speak of: as kvpress runs."""
  lm, names = checkpoints["held_out"], sorted(QUICK)
  plans = {
    (press, 50): kvjax.get_plan(COUNTERPARTS[press], kvjax.Retention(0.5))
    for press in names
  }
  compare(lm, "held_out", plans, LENGTHS[1:])


@pytest.mark.parametrize(
  "name", ["held_out", pytest.param("small", marks=pytest.mark.slow)]
)
def test_layers_have_budgets_of_their_own(name, checkpoints):
  shares = [kvjax.Retention(1 - removed) for removed in PER_LAYER[name]]
  method = "snapkv.kvpress:window=16"
  plan = kvjax.get_plan(method, kvjax.PerLayer(shares))
  compare(checkpoints[name], name, {("per_layer", 0): plan})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "held_out"])
def test_another_method_evicts_while_decoding(name, checkpoints):
  """PrefillDecodingPress: SnapKVPress, then KeyDiffPress to 48 tokens."""
  lm = checkpoints[name]
  rows = [tiny_llama.prompt(name, n) for n in LENGTHS]
  later = kvjax.get_plan(
    "keydiff", kvjax.Tokens(48), schedule=kvjax.Schedule(every=8)
  )
  plan = kvjax.get_plan(
    "snapkv.kvpress:window=16", kvjax.Retention(0.5), decoding=later
  )
  cache, logits = kvjax.prefill(
    lm.model, lm.params, kvjax.Prompts.of(rows), plan
  )
  assert cache.plan == later
  with golden("decoded") as stored:
    tokens = [stored[f"{name}/{n}/tokens"] for n in LENGTHS]
    kept = [stored[f"{name}/{n}/kept"] for n in LENGTHS]
  after = kvjax.generate(
    lm.model,
    lm.params,
    kvjax.reserve(cache, 64),
    logits,
    kvjax.Decoding(len(tokens[0])),
    keep=True,
  )
  assert after.rows() == [row.tolist() for row in tokens]
  for row, theirs in enumerate(kept):
    assert kept_positions(after.cache, row) == theirs.tolist()


@pytest.mark.parametrize(
  "press",
  ["rerotate_keydiff", pytest.param("rerotate_snapkv", marks=pytest.mark.slow)],
)
def test_rerotated_keys_are_those_of_kvpress(press, checkpoints):
  method = {
    "rerotate_keydiff": "rerotate/keydiff.kvpress",
    "rerotate_snapkv": "rerotate/snapkv.kvpress:window=16",
  }[press]
  plan = kvjax.get_plan(method, kvjax.Retention(0.3))
  for name, lm in checkpoints.items():
    rows = [tiny_llama.prompt(name, n) for n in LENGTHS]
    prompts = kvjax.Prompts.of(rows)
    cache, _ = kvjax.prefill(lm.model, lm.params, prompts, plan)
    with golden("rerotated") as stored:
      theirs = stored[f"{name}/{press}/{LENGTHS[0]}/70"]
    count = theirs.shape[2]
    assert int(cache.next_positions[0]) == count
    ours = np.stack([layer.keys[0, :, :count] for layer in cache.layers])
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("press", "method"),
  [("compactor", "compactor.kvpress"), ("noncausal", "noncausal.kvpress")],
)
def test_padding_does_not_vote_in_a_last_chunk(press, method, checkpoints):
  """With a last chunk of 121 of 256 tokens, or of 133.

  kvpress lets padding take part in its attention and then keeps other tokens;
  with the padding masked, it keeps those of kvjax.
  """
  plans = {
    (f"mended_{press}", percent): kvjax.get_plan(
      method, kvjax.Retention(1 - percent / 100)
    )
    for percent in PERCENTS[:2]
  }
  compare(checkpoints["small"], "small", plans, [LONG])
  with golden("small") as stored:
    for percent in PERCENTS[:2]:
      case = f"{press}/{LONG}/{percent}"
      assert not np.array_equal(stored[case], stored[f"mended_{case}"])


def test_every_golden_is_compared():
  with golden("small") as small, golden("held_out") as held_out:
    for stored in (small, held_out):
      presses = {case.split("/")[0] for case in stored.files}
      others = {"per_layer", "compactor", "mended_compactor", "noncausal"}
      assert presses - others == set(COUNTERPARTS)


def test_a_model_without_a_tokenizer_is_saved_and_loaded(checkpoints, tmp_path):
  lm = checkpoints["held_out"]
  assert lm.tokenizer is None
  save(lm, tmp_path / "saved")
  again = load(tmp_path / "saved", dtype="float32")
  assert again.tokenizer is None
  assert again.config == lm.config
  prompts = kvjax.Prompts.of([tiny_llama.prompt("held_out", 20)])
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  logits = [
    np.asarray(kvjax.prefill(each.model, each.params, prompts, plan)[1])
    for each in (lm, again)
  ]
  np.testing.assert_array_equal(*logits)
  # What the files say besides, as transformers reads it, stays.
  for name in ("bos_token_id", "eos_token_id"):
    assert _field(tmp_path / "saved", name) == tiny_llama.config("small")[name]


def _field(directory, name):
  fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
  return fields.get(name)
