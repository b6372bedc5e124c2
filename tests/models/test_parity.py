"""Logits equal those that transformers gave (tests/golden)."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
from models.config import DecoderConfig
from models.pretrained import load, load_decoder
from models.rope import rotate

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "transformers"
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
PUBLISHED = json.loads((GOLDEN / "published_configs.json").read_text())
TOLERANCE = 1e-4


def attend(layer, state, seen):
  """Dense causal attention; a row's tokens see its earlier tokens."""
  kv_heads = seen.keys.shape[1]
  groups = seen.queries.shape[1] // kv_heads
  queries = jnp.stack(jnp.split(seen.queries, kv_heads, axis=1), axis=1)
  assert queries.shape[2] == groups
  scores = jnp.einsum("bkgsd,bktd->bkgst", queries, seen.keys)
  scores = scores.astype(np.float32) * seen.keys.shape[-1] ** -0.5
  at, of = seen.positions[:, :, None], seen.positions[:, None, :]
  visible = ((of >= 0) & (of <= at))[:, None, None]
  scores = jnp.where(visible, scores, -1e30)
  weights = jax.nn.softmax(scores, axis=-1).astype(seen.values.dtype)
  mixed = jnp.einsum("bkgst,bktd->bkgsd", weights, seen.values)
  return mixed.reshape(seen.queries.shape), state


@jax.jit(static_argnames="model")
def logits_of(model, params, ids, positions):
  states = (None,) * model.geometry.layers
  hidden, _ = model.hidden(params, ids, positions, states, attend)
  return model.logits(params, hidden)


def error(model, params, golden, case):
  """Largest difference from the golden logits, over the tokens."""
  ids, positions = golden[f"{case}_ids"], golden[f"{case}_positions"]
  ours = np.asarray(logits_of(model, params, ids, positions))
  assert ours.dtype == np.float32
  tokens = golden[f"{case}_mask"] == 1
  return np.abs(ours - golden[f"{case}_logits"])[tokens].max()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
  name = request.param
  golden = dict(np.load(GOLDEN / f"{name}.npz"))
  return name, *load_decoder(GOLDEN / name, "float32"), golden


def test_there_are_goldens_for_every_family():
  assert set(FAMILIES) == set(PUBLISHED)
  types = {fields["model_type"] for fields in PUBLISHED.values()}
  assert types == {"llama", "qwen2", "qwen3", "mistral"}


@pytest.mark.parametrize("case", ["right", "left", "long"])
def test_logits_equal_those_of_transformers(family, case):
  name, model, params, golden = family
  context = PUBLISHED[name]["max_position_embeddings"]
  scaling = PUBLISHED[name].get("rope_scaling", {})
  original = scaling.get("original_max_position_embeddings", context)
  if scaling or name == "llama3":
    assert golden["long_ids"].shape[1] > original
  assert error(model, params, golden, case) < TOLERANCE


def test_bfloat16_rounds_no_worse_than_in_pytorch(family):
  name, _, _, golden = family
  if name == "llama_dynamic":
    pytest.skip("transformers runs the rows of this family one by one")
  model, params = load_decoder(GOLDEN / name, "bfloat16")
  exact, tokens = golden["right_logits"], golden["right_mask"] == 1
  ours = logits_of(
    model, params, golden["right_ids"], golden["right_positions"]
  )

  def root_mean_square(logits):
    return np.sqrt(np.mean((logits - exact)[tokens] ** 2))

  theirs = root_mean_square(golden["right_bfloat16"])
  assert theirs > 0
  assert root_mean_square(np.asarray(ours)) < 1.25 * theirs


def test_the_engine_is_right_past_the_original_context(family):
  _, model, params, golden = family
  (row,) = golden["long_ids"].tolist()
  prompts = kvjax.Prompts.of([row])
  plan = kvjax.Plan(kvjax.get_method("full"), kvjax.Retention(1.0))
  if model.geometry.max_positions < len(row):
    with pytest.raises(InputError, match=f"has {len(row)} tokens; this model"):
      kvjax.prefill(model, params, prompts, plan)
    geometry = dataclasses.replace(model.geometry, max_positions=len(row))
    model = dataclasses.replace(model, geometry=geometry)
  _, logits = kvjax.prefill(model, params, prompts, plan)
  last = golden["long_logits"][:, -1]
  np.testing.assert_allclose(logits, last, atol=TOLERANCE)


def test_the_engine_generates_what_transformers_generates(family):
  name, model, params, golden = family
  if name == "llama_dynamic":
    pytest.skip("transformers rescales the cached keys of this family")
  lengths = golden["right_mask"].sum(axis=1)
  rows = [ids[:n] for ids, n in zip(golden["right_ids"], lengths, strict=True)]
  prompts = kvjax.Prompts.of([row.tolist() for row in rows])
  whole = kvjax.Retention(1.0)
  method = kvjax.get_method("full")
  cache, logits = kvjax.prefill(
    model, params, prompts, kvjax.Plan(method, whole)
  )
  last = golden["right_logits"][np.arange(len(rows)), lengths - 1]
  np.testing.assert_allclose(logits, last, atol=TOLERANCE)
  expected = golden["generated"]
  decoding = kvjax.Decoding(expected.shape[1])
  answers = kvjax.complete(model, params, cache, logits, decoding)
  np.testing.assert_array_equal(answers.tokens, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_move_to_other_positions(name):
  model, _ = load_decoder(GOLDEN / name, "float32")
  dim = model.geometry.head_dim
  x = jax.random.normal(jax.random.key(0), (2, 3, 20, dim))
  places = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32)[None], (2, 20))
  by = jnp.asarray([[[7], [3], [0]], [[1], [50], [2]]], jnp.int32)
  by = jnp.broadcast_to(by, (2, 3, 20))
  if name == "llama_dynamic":
    with pytest.raises(InputError, match="depend on the length of the row"):
      model.rerotated(x, by)
    return
  here = rotate(x, *model.rope.tables(places))
  for head in range(3):
    moved = places + by[:, head]
    there = rotate(x[:, head : head + 1], *model.rope.tables(moved))
    got = model.rerotated(here, by)[:, head : head + 1]
    np.testing.assert_allclose(got, there, atol=2e-5)


def test_transformers_reads_the_bundled_model_as_we_do():
  """The directory was written by `models.save`."""
  golden = dict(np.load(GOLDEN.parent / "reference.npz"))
  lm = load(ROOT / "models" / "reference", "float32")
  ids = lm.tokenizer.encode(str(golden["text"]))
  assert ids == golden["ids"][0].tolist()
  positions = np.arange(len(ids), dtype=np.int32)[None]
  logits = logits_of(lm.model, lm.params, golden["ids"], positions)
  np.testing.assert_allclose(logits[:, -8:], golden["logits"], atol=TOLERANCE)
  prompts = kvjax.Prompts.of([ids])
  cache, logits = kvjax.prefill(
    lm.model,
    lm.params,
    prompts,
    kvjax.Plan(kvjax.get_method("full"), kvjax.Retention(1.0)),
  )
  decoding = kvjax.Decoding(golden["generated"].shape[1])
  answers = kvjax.complete(lm.model, lm.params, cache, logits, decoding)
  np.testing.assert_array_equal(answers.tokens, golden["generated"])


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_of_the_hub_and_of_transformers_5_mean_the_same(name):
  written = json.loads((GOLDEN / name / "config.json").read_text())
  config = DecoderConfig.from_hf(written)
  assert DecoderConfig.from_hf(PUBLISHED[name]) == config
  assert DecoderConfig.from_hf(config.to_hf()) == config
