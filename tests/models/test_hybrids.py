"""Models whose layers differ: what is kept, saved and sharded of them."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.checkpoint.loading import load_cache
from kvjax.checkpoint.saving import save_cache
from kvjax.engine.forward import (
  attend_to_prompt,
  block_positions,
  hidden_states,
)
from kvjax.experiments.run.token_counts import TokenCounts
from kvjax.kernels import dispatch
from kvjax.models.pretrained import load_decoder
from kvjax.testing import kept_positions

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
WHOLE = "model.safetensors"
# Of the golden models with windows.
WINDOW = 12
HYBRIDS = ("gemma3", "gpt_oss", "cohere2", "olmo3", "qwen3_window")
UNIFORM = ("qwen3_moe", "smollm3", "phi3", "olmo2", "granite")
LOCAL = ("mistral_window", "phi3_window")
SPARSE = ("gpt_oss", "qwen3_moe", "qwen3_moe_shares")
DRAW = np.random.default_rng(0)
LENGTHS = (41, 23, 33, 7)
ROWS = [DRAW.integers(3, 80, length).tolist() for length in LENGTHS]
PROMPTS = kvjax.Prompts.of(ROWS)
QUESTIONS = kvjax.Prompts.of([[5, 6, 7], [8], [9, 10], [11, 12, 13]])
KEPT = 9
PLAN = kvjax.get_plan("keydiff", kvjax.Tokens(KEPT))
WHOLE_PLAN = kvjax.get_plan("full", kvjax.Retention(1.0))


def prefilled(name, plan=PLAN, mesh=None):
  model, params = load_decoder(GOLDEN / name, "float32", mesh)
  return model, params, *kvjax.prefill(model, params, PROMPTS, plan)


@jax.jit(static_argnames="model")
def projections(model, params, tokens, lengths):
  """The queries and keys of each layer, rotated."""

  def attend(layer, state, seen):
    return attend_to_prompt(seen), (seen.queries, seen.keys)

  positions = block_positions(jnp.zeros_like(lengths), tokens.shape[1], lengths)
  none = (None,) * model.geometry.num_layers
  return hidden_states(model, params, tokens, positions, none, attend)[1]


def projected(model, params):
  tokens, lengths = jnp.asarray(PROMPTS.tokens), jnp.asarray(PROMPTS.lengths)
  layers = projections(model, params, tokens, lengths)
  return jax.tree.map(lambda x: np.asarray(x, np.float64), layers)


@pytest.mark.parametrize("name", [*HYBRIDS, *UNIFORM])
def test_global_layers_keep_what_scores_best_and_the_others_their_window(name):
  """KeyDiff written out: keys least like the mean of their directions."""
  model, params, cache, _ = prefilled(name)
  kinds = {spec.window for spec in model.geometry.layers}
  assert kinds == ({None, WINDOW} if name in HYBRIDS else {None})
  layers = projected(model, params)
  for row, length in enumerate(LENGTHS):
    kept = kept_positions(cache, row)
    for layer, spec in enumerate(model.geometry.layers):
      newest = list(range(max(0, length - WINDOW), length))
      for head in range(spec.kv_heads):
        if spec.window is not None:
          assert kept[layer][head] == newest
          continue
        keys = layers[layer][1][row, head, :length]
        units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        best = np.argsort(units @ units.mean(axis=0), kind="stable")[:KEPT]
        assert kept[layer][head] == sorted(best.tolist())


# The scale of the logits, as the configuration of each family states it.
SCALES = {
  "gpt_oss": lambda config: config["head_dim"] ** -0.5,
  "gemma3": lambda config: config["query_pre_attn_scalar"] ** -0.5,
  "granite": lambda config: config["attention_multiplier"],
}
OBSERVED = 4


def votes_of(queries, keys, scale, sinks):
  """SnapKV written out, for the query heads of one KV head.

  Args:
    queries: [heads, tokens, width].
    keys: [tokens, width].
    scale: of the logits.
    sinks: a logit of each head, or None.
  """
  length = len(keys)
  votes = np.zeros(length)
  for head, own in enumerate(queries):
    for place in range(max(0, length - OBSERVED), length):
      weights = np.exp(keys[: place + 1] @ own[place] * scale)
      total = weights.sum()
      if sinks is not None:
        total += np.exp(np.float64(sinks[head]))
      votes[: place + 1] += weights / total / len(queries)
  votes[length - OBSERVED :] = 0
  pooled = np.convolve(votes, np.full(3, 1 / 3), "same")
  pooled[length - OBSERVED :] = np.inf
  return pooled


@pytest.mark.parametrize("name", SCALES)
def test_attention_that_methods_read_has_the_scale_and_the_sinks(name):
  plan = kvjax.get_plan(f"snapkv:window={OBSERVED}:kernel=3", PLAN.budget)
  model, params, cache, _ = prefilled(name, plan)
  scale = SCALES[name](json.loads((GOLDEN / name / "config.json").read_text()))
  tensors = safetensors.numpy.load_file(GOLDEN / name / WHOLE)
  layers = projected(model, params)
  for row, length in enumerate(LENGTHS):
    kept = kept_positions(cache, row)
    for layer, spec in enumerate(model.geometry.layers):
      if spec.window is not None:
        continue
      group = spec.heads // spec.kv_heads
      sinks = tensors.get(f"model.layers.{layer}.self_attn.sinks")
      queries, keys = layers[layer]
      for head in range(spec.kv_heads):
        own = slice(head * group, (head + 1) * group)
        votes = votes_of(
          queries[row, own, :length],
          keys[row, head, :length],
          scale,
          None if sinks is None else sinks[own],
        )
        best = np.argsort(-votes, kind="stable")[:KEPT]
        assert kept[layer][head] == sorted(best.tolist())


def test_a_model_with_windows_alone_is_said_not_to_be_compressed():
  with pytest.warns(kvjax.InputWarning, match="keydiff compresses nothing"):
    _, _, cache, _ = prefilled("mistral_window")
  for row, length in enumerate(LENGTHS):
    newest = list(range(max(0, length - WINDOW), length))
    assert kept_positions(cache, row) == [[newest] * 2] * 2
  # Without a warning, which would be an error here.
  prefilled("mistral_window", WHOLE_PLAN)


def test_a_run_counts_tokens_in_global_layers_and_in_all():
  model, _, cache, _ = prefilled("gpt_oss")
  counts = TokenCounts.of(cache)
  of_global = np.minimum(LENGTHS, KEPT)
  np.testing.assert_allclose(counts.kept_globally, of_global)
  # Every other layer has a window.
  windows = [spec.window for spec in model.geometry.layers]
  assert windows == [WINDOW, None] * 2
  local = np.minimum(LENGTHS, WINDOW)
  np.testing.assert_allclose(counts.kept, (of_global + local) / 2)
  uniform = prefilled("qwen3_moe")[2]
  assert TokenCounts.of(uniform).kept_globally is None


@pytest.mark.parametrize("name", HYBRIDS)
def test_windows_are_counted_in_the_memory(name):
  model, _, cache, _ = prefilled(name)
  token = 0
  for spec in model.geometry.layers:
    slots = WINDOW if spec.window else KEPT
    # Keys and values in 4 bytes, and a position.
    token += slots * spec.kv_heads * (2 * spec.key_dim * 4 + 4)
  counters = cache.nbytes - len(ROWS) * token
  # The next position of each row, and a cursor of each global layer.
  assert 0 <= counters <= 4 * (len(ROWS) + model.geometry.num_layers)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_step_on_a_gpu_reads_the_weights_of_its_layers(name):
  """Without a loop over the pattern, and each layer where its number says."""
  given = prefilled(name)
  wanted = kvjax.generate(*given, kvjax.Decoding(4))
  with dispatch.use("xla", "gpu"):
    found = kvjax.generate(*given, kvjax.Decoding(4))
  np.testing.assert_array_equal(found.tokens, wanted.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_row_of_a_compressed_hybrid_answers_as_it_does_alone(name):
  """Decoding goes past the window."""
  model, params, cache, _ = prefilled(name)
  decoding = kvjax.Decoding(2 * WINDOW)
  together = kvjax.generate(model, params, cache, QUESTIONS, decoding).rows()
  for row in range(2):
    prompts = kvjax.Prompts.of(ROWS[row : row + 1])
    alone, _ = kvjax.prefill(model, params, prompts, PLAN)
    question = kvjax.Prompts.of([[5, 6, 7], [8]][row : row + 1])
    answers = kvjax.generate(model, params, alone, question, decoding)
    assert answers.rows()[0] == together[row]


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_blocks_of_a_prompt_fill_the_rings_as_a_whole_prompt_does(name):
  whole = WHOLE_PLAN
  blocks = dataclasses.replace(whole, schedule=kvjax.Schedule(block=16))
  _, _, one, logits = prefilled(name, whole)
  _, _, other, in_blocks = prefilled(name, blocks)
  np.testing.assert_allclose(in_blocks, logits, atol=1e-4)
  for row in range(len(ROWS)):
    assert kept_positions(one, row) == kept_positions(other, row)


@pytest.mark.parametrize("name", [*HYBRIDS, *UNIFORM])
def test_a_cache_comes_back(name, tmp_path):
  model, params, cache, _ = prefilled(name)
  save_cache(cache, tmp_path, model=model, model_id="tiny")
  again = load_cache(tmp_path, model=model, model_id="tiny")
  decoding = kvjax.Decoding(6)
  one, other = (
    kvjax.generate(model, params, each, QUESTIONS, decoding).rows()
    for each in (cache, again)
  )
  assert one == other
  assert again.nbytes == cache.nbytes


@pytest.mark.parametrize("mesh", ["data:2,model:2", "model:4"])
@pytest.mark.parametrize("name", [*HYBRIDS, *UNIFORM, *LOCAL])
def test_a_mesh_changes_nothing(name, mesh):
  # Of models with windows alone, methods leave all layers as they are.
  plan = WHOLE_PLAN if name in LOCAL else PLAN
  _, _, cache, logits = prefilled(name, plan)
  devices = parse_mesh(mesh)
  with jax.set_mesh(devices):
    model, params, spread, others = prefilled(name, plan, devices)
    mlp = params["layers"][0]["mlp"]
    if model.config.kinds[0].sparse:
      mlp = mlp["experts"]
    up = mlp["up_proj"]["kernel"][...]
    share = up.shape[-1] // devices.shape["model"]
    assert up.addressable_shards[0].data.shape[-1] == share
  np.testing.assert_allclose(logits, others, rtol=0, atol=1e-4)
  for row in range(len(ROWS)):
    assert kept_positions(cache, row) == kept_positions(spread, row)


@pytest.mark.parametrize("mesh", ["data:1,model:1", "model:4"])
@pytest.mark.parametrize("name", SPARSE)
def test_grouped_experts_compute_what_blocks_of_rows_do(name, mesh):
  """The program of TPUs, by XLA and on CPUs, and that of CPUs."""
  _, _, _, blocked = prefilled(name)
  devices = parse_mesh(mesh)
  with jax.set_mesh(devices), dispatch.use("xla", "tpu"):
    _, _, _, grouped = prefilled(name, mesh=devices)
  np.testing.assert_allclose(grouped, blocked, rtol=0, atol=1e-4)


def test_the_order_of_experts_does_not_matter(tmp_path):
  _, _, _, expected = prefilled("gpt_oss")
  shutil.copy(GOLDEN / "gpt_oss" / "config.json", tmp_path)
  tensors = safetensors.numpy.load_file(GOLDEN / "gpt_oss" / WHOLE)
  order = [2, 0, 3, 1]
  moved = {
    name: np.ascontiguousarray(x[order]) if ".mlp." in name else x
    for name, x in tensors.items()
  }
  assert any(np.any(moved[name] != tensors[name]) for name in tensors)
  safetensors.numpy.save_file(moved, tmp_path / WHOLE)
  _, _, _, logits = prefilled(tmp_path)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


def test_keys_without_rope_are_the_same_in_all_places():
  """SmolLM3: one layer of four has no rotary embedding."""
  model, _, before, _ = prefilled("smollm3")
  moving = kvjax.get_plan("rerotate/keydiff", kvjax.Tokens(KEPT))
  after = prefilled("smollm3", moving)[2]
  rope = model.config.rope
  kinds = [
    model.config.kinds[spec.weights].rope for spec in model.geometry.layers
  ]
  assert kinds == ["global"] * 3 + [None]
  # The shortest row is padded.
  rows = slice(0, len(LENGTHS) - 1)
  places = jnp.tile(jnp.arange(KEPT, dtype=jnp.int32), (len(LENGTHS) - 1, 1))
  for layer, kind in enumerate(kinds):
    one, other = before.layers[layer], after.layers[layer]
    np.testing.assert_array_equal(other.positions[rows, 0], places)
    expected = one.keys[rows]
    if kind is not None:
      # Each head by itself: it keeps other tokens.
      turned = []
      for head in range(expected.shape[1]):
        cos, sin = rope.tables(one.positions[rows, head])
        keys = rope.rotate(expected[:, head, None], (cos, -sin))
        turned.append(rope.rotate(keys, rope.tables(places)))
      expected = jnp.concatenate(turned, axis=1)
    np.testing.assert_allclose(other.keys[rows], expected, atol=1e-5)
  np.testing.assert_array_equal(before.layers[3].keys, after.layers[3].keys)


def test_places_do_not_matter_to_a_model_without_rope(tmp_path):
  """In blocks and while decoding, where every step moves the keys."""
  fields = json.loads((GOLDEN / "smollm3" / "config.json").read_text())
  shutil.copy(GOLDEN / "smollm3" / WHOLE, tmp_path)
  for rotated in (0, 1):
    fields["no_rope_layers"] = [rotated] * fields["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    logits, rows = [], []
    for name in ("streaming", "rerotate/streaming"):
      schedule = kvjax.Schedule(block=8, every=1)
      plan = kvjax.get_plan(name, kvjax.Tokens(KEPT), schedule=schedule)
      model, params, cache, last = prefilled(tmp_path, plan)
      logits.append(last)
      decoding = kvjax.Decoding(10)
      answers = kvjax.generate(model, params, cache, QUESTIONS, decoding)
      rows.append(answers.rows())
    same = np.abs(logits[0] - logits[1]).max() < 1e-5
    assert same == (not rotated)
    assert (rows[0] == rows[1]) or rotated
