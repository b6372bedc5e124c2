"""Logits equal those that transformers gave (tests/golden)."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine.forward import States, hidden_states, run_layers
from kvjax.engine.model_layers import index_layer
from kvjax.errors import InputError
from kvjax.models import token_chunks
from kvjax.models.config import DecoderConfig
from kvjax.models.families import FAMILIES as MODEL_TYPES
from kvjax.models.pretrained import load, load_decoder

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "transformers"
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
PUBLISHED = json.loads((GOLDEN / "published_configs.json").read_text())
TOLERANCE = 1e-4
# Families whose programs differ in numbers alone from those of the others,
# which have tied weights, biases and every kind of rotary embedding too.
ALIKE = {"llama3", "llama32", "qwen25", "qwen25_yarn", "gpt_oss_mxfp4"}
# Families whose keys cannot be moved, and why.
FIXED = {
  "llama_dynamic": "depend on the length of the row",
  "phi3": "depend on the length of the row",
}


def attend(seen):
  """Dense causal attention; a row's tokens see its earlier tokens."""
  kv_heads = seen.keys.shape[1]
  groups = seen.queries.shape[1] // kv_heads
  queries = jnp.stack(jnp.split(seen.queries, kv_heads, axis=1), axis=1)
  assert queries.shape[2] == groups
  scores = jnp.einsum("bkgsd,bktd->bkgst", queries, seen.keys)
  options = seen.attention
  scale = options.scale or seen.keys.shape[-1] ** -0.5
  scores = scores.astype(np.float32) * scale
  at, of = seen.positions[:, :, None], seen.positions[:, None, :]
  visible = (of >= 0) & (of <= at)
  if options.window:
    visible &= of > at - options.window
  scores = jnp.where(visible[:, None, None], scores, -1e30)
  if seen.sinks is not None:
    sinks = seen.sinks.reshape(1, kv_heads, groups, 1, 1)
    sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
    scores = jnp.concatenate([scores, sinks], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1).astype(seen.values.dtype)
  weights = weights[..., : seen.keys.shape[2]]
  mixed = jnp.einsum("bkgst,bktd->bkgsd", weights, seen.values)
  return mixed.reshape(seen.queries.shape)


@jax.jit(static_argnames="model")
def logits_of(model, params, ids, positions):
  """Logits by the loop over layers that the engine runs."""

  def step(place, stack, seen):
    return attend(seen), stack

  hidden, _ = run_layers(
    model, params, ids, positions, States.none(model), step
  )
  return model.logits(params, hidden)


@jax.jit(static_argnames="model")
def unrolled(model, params, ids, positions):
  """Logits with each layer written out, and what the layers project."""

  def own(layer, state, seen):
    return attend(seen), seen

  states = (None,) * model.geometry.num_layers
  hidden, seen = hidden_states(model, params, ids, positions, states, own)
  return model.logits(params, hidden), seen


CASES = ("right", "left", "long")


def padded(golden, kind, empty):
  """What is known of all cases, as wide as the longest."""
  parts = [golden[f"{case}_{kind}"] for case in CASES]
  width = max(part.shape[1] for part in parts)
  return np.concatenate(
    [
      np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=empty)
      for part in parts
    ]
  )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
  name = request.param
  golden = dict(np.load(GOLDEN / f"{name}.npz"))
  return name, *load_decoder(GOLDEN / name, "float32"), golden


def test_there_are_goldens_for_every_family():
  assert set(FAMILIES) == set(PUBLISHED)
  types = {fields["model_type"] for fields in PUBLISHED.values()}
  assert types == set(MODEL_TYPES)


def test_logits_equal_those_of_transformers(family):
  name, model, params, golden = family
  context = PUBLISHED[name]["max_position_embeddings"]
  scaling = PUBLISHED[name].get("rope_scaling") or {}
  for fields in (PUBLISHED[name], scaling):
    context = fields.get("original_max_position_embeddings", context)
  original = context
  if name == "gemma3":
    # Its context is the scaled one.
    original = context / scaling["factor"]
  if scaling or name == "llama3":
    assert golden["long_ids"].shape[1] > original
  ids, positions = padded(golden, "ids", 0), padded(golden, "positions", -1)
  ours = np.asarray(logits_of(model, params, ids, positions))
  assert ours.dtype == np.float32
  row = 0
  for case in CASES:
    tokens, theirs = golden[f"{case}_mask"] == 1, golden[f"{case}_logits"]
    mine = ours[row : row + len(tokens), : tokens.shape[1]]
    row += len(tokens)
    assert np.abs(mine - theirs)[tokens].max() < TOLERANCE, case


def test_layers_written_out_give_the_same_and_all_that_methods_read(
  family, monkeypatch
):
  """Written out in chunks of tokens, too."""
  name, model, params, golden = family
  if name in ALIKE - {"qwen25"}:
    pytest.skip("another family does the same")
  ids, positions = golden["right_ids"], golden["right_positions"]
  tokens = golden["right_mask"] == 1
  looped = logits_of(model, params, ids, positions)
  monkeypatch.setattr(token_chunks, "MOST", {"cpu": ids.shape[1] // 3})
  with monkeypatch.context() as counting:
    written, write = [], token_chunks._Chunks.write
    counting.setattr(
      token_chunks._Chunks,
      "write",
      lambda *given: written.append(given) or write(*given),
    )
    logits, seen = unrolled(model, params, ids, positions)
  # A loop before the attention, and one after it if there are no experts.
  assert len(written) >= model.geometry.num_layers
  np.testing.assert_allclose(logits[tokens], looped[tokens], atol=TOLERANCE)
  assert len(seen) == model.geometry.num_layers
  config = model.config
  places = zip(model.geometry.layers, model.geometry.weight_index, strict=True)
  for block, (spec, index) in zip(seen, places, strict=True):
    kind = config.kinds[spec.weights]
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.key_dim
    assert block.queries.shape[1:] == (heads, ids.shape[1], dim)
    assert block.keys.shape[1:] == (kv_heads, ids.shape[1], dim)
    assert block.values.shape[3] == spec.value_width
    for unrotated, rotated in (
      (block.queries_unrotated, block.queries),
      (block.keys_unrotated, block.keys),
    ):
      expected = unrotated
      if kind.rope is not None:
        rope = config.ropes[kind.rope]
        expected = rope.rotate(unrotated, rope.tables(jnp.asarray(positions)))
      np.testing.assert_allclose(expected, rotated, atol=1e-5)
    attention = index_layer(params["layers"][spec.weights]["self_attn"], index)
    values = block.inputs @ attention["v_proj"]["kernel"][...]
    if "bias" in attention["v_proj"]:
      values += attention["v_proj"]["bias"][...][None, None]
    split = values.reshape(*ids.shape, kv_heads, dim).swapaxes(1, 2)
    np.testing.assert_allclose(block.values, split, atol=1e-5)
    kernel = attention["o_proj"]["kernel"][...]
    np.testing.assert_array_equal(
      block.output_projection, kernel.reshape(heads, dim, -1)
    )


def test_bfloat16_rounds_no_worse_than_in_pytorch(family):
  name, _, _, golden = family
  if name in ALIKE:
    pytest.skip("another family does the same")
  if name == "llama_dynamic":
    pytest.skip("transformers runs the rows of this family one by one")
  model, params = load_decoder(GOLDEN / name, "bfloat16")
  exact, tokens = golden["right_logits"], golden["right_mask"] == 1
  ours = logits_of(
    model, params, golden["right_ids"], golden["right_positions"]
  )

  # Where two experts are nearly tied, rounding changes a token's expert, so
  # that a few tokens say nothing about the others.
  average = np.median if model.config.experts else np.mean

  def root_mean_square(logits):
    return np.sqrt(average(np.mean((logits - exact)[tokens] ** 2, axis=1)))

  theirs = root_mean_square(golden["right_bfloat16"])
  assert theirs > 0
  assert root_mean_square(np.asarray(ours)) < 1.25 * theirs


def test_the_engine_generates_what_transformers_generates(family):
  """Rows beside one that goes past the original context."""
  name, model, params, golden = family
  if name in ALIKE:
    pytest.skip("another family does the same")
  (long,) = golden["long_ids"].tolist()
  lengths = golden["right_mask"].sum(axis=1)
  rows = [
    ids[:n].tolist()
    for ids, n in zip(golden["right_ids"], lengths, strict=True)
  ]
  prompts = kvjax.Prompts.of([*rows, long])
  plan = kvjax.Plan(kvjax.get_method("full"), kvjax.Retention(1.0))
  # transformers rescales the cached keys of llama_dynamic.
  expected = golden.get("generated", np.zeros((len(rows), 0)))
  total = len(long) + expected.shape[1]
  if model.geometry.max_positions < total:
    with pytest.raises(InputError, match=f"has {len(long)} tokens; this model"):
      kvjax.prefill(model, params, prompts, plan)
    geometry = dataclasses.replace(model.geometry, max_positions=total)
    model = dataclasses.replace(model, geometry=geometry)
  cache, logits = kvjax.prefill(model, params, prompts, plan)
  last = golden["right_logits"][np.arange(len(rows)), lengths - 1]
  last = np.concatenate([last, golden["long_logits"][:, -1]])
  np.testing.assert_allclose(logits, last, atol=TOLERANCE)
  if name == "llama_dynamic":
    return
  decoding = kvjax.Decoding(expected.shape[1])
  answers = kvjax.generate(model, params, cache, logits, decoding)
  np.testing.assert_array_equal(answers.tokens[: len(rows)], expected)


def test_keys_move_to_other_positions(family):
  name, model, _, _ = family
  dim = model.geometry.layers[0].key_dim
  x = np.random.default_rng(0).normal(size=(2, 3, 20, dim))
  x = jnp.asarray(x, jnp.float32)
  places = np.broadcast_to(np.arange(20, dtype=np.int32), (2, 20))
  by = np.asarray([[[7], [3], [0]], [[1], [50], [2]]], np.int32)
  by = jnp.asarray(np.broadcast_to(by, (2, 3, 20)))
  if name in FIXED:
    with pytest.raises(InputError, match=FIXED[name]):
      model.rerotate(x, by, model.geometry.layers[0])
    return
  move = jax.jit(model.rerotate, static_argnums=2)
  for spec in dict.fromkeys(model.geometry.layers):
    name = model.config.kinds[spec.weights].rope
    if name is None:
      np.testing.assert_array_equal(move(x, by, spec), x)
      continue
    rope = model.config.ropes[name]

    @jax.jit
    def rotated(x, places, rope=rope):
      return rope.rotate(x, rope.tables(places))

    got = move(rotated(x, places), by, spec)
    for head in range(3):
      # All heads by as much: those of others are not looked at.
      there = rotated(x, places + np.asarray(by)[:, head])
      np.testing.assert_allclose(got[:, head], there[:, head], atol=2e-5)


def test_transformers_reads_the_bundled_model_as_we_do():
  """The directory was written by `kvjax.models.save`."""
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
  answers = kvjax.generate(lm.model, lm.params, cache, logits, decoding)
  np.testing.assert_array_equal(answers.tokens, golden["generated"])


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_of_the_hub_and_of_transformers_5_mean_the_same(name):
  written = json.loads((GOLDEN / name / "config.json").read_text())
  config = DecoderConfig.from_hf(written)
  assert DecoderConfig.from_hf(PUBLISHED[name]) == config
  assert DecoderConfig.from_hf(config.to_hf()) == config
