"""Long prompts go through a layer in chunks of tokens, with equal results."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import kvjax
from kvjax import kernels
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.engine.forward import prompt_hidden
from kvjax.engine.prompt_programs import forward_layers
from kvjax.experiments.timing.random_models import random_llama
from kvjax.models import token_chunks
from kvjax.models.pretrained import load_decoder
from kvjax.models.token_chunks import map_tokens, update_tokens

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
SIZES = dict(
  hidden_size=16,
  intermediate_size=1024,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
  vocab_size=32,
  max_position_embeddings=16_384,
)


def doubled(x, y):
  """Two results, with tokens along other axes."""
  return {"sum": x + y[:, :, 0], "heads": jnp.swapaxes(y, 1, 2)}


@pytest.mark.parametrize(
  ("rows", "length", "most", "steps"),
  [
    (1, 12, 4, 3),
    (3, 12, 4, 9),
    (3, 4, 4, 3),  # a chunk is a whole row
    (2, 14, 6, 0),  # nothing from 3 to 6 divides 14
    (2, 15, 7, 6),
    (1, 4, 4, 0),
    (2, 3, 12, 0),
  ],
)
def test_chunks_are_of_equal_sizes(rows, length, most, steps, monkeypatch):
  monkeypatch.setattr(token_chunks, "MOST", {"cpu": most})
  x = jax.random.normal(jax.random.key(0), (rows, length, 5))
  y = jax.random.normal(jax.random.key(1), (rows, length, 2, 5))
  wanted = doubled(x, y)
  jax.tree.map(assert_allclose, map_tokens(doubled, x, y), wanted)
  updated = update_tokens(lambda x, y: doubled(x, y)["sum"], x, y)
  assert_allclose(updated, wanted["sum"])
  text = str(jax.make_jaxpr(lambda x, y: map_tokens(doubled, x, y))(x, y))
  assert (f"length={steps}" in text) == (steps > 0)
  assert ("scan" in text) == (steps > 0)


@pytest.mark.parametrize(("length", "steps"), [(1, 0), (6, 6)])
def test_rows_of_a_mesh_may_be_more_than_the_tokens_of_a_chunk(
  length, steps, monkeypatch
):
  monkeypatch.setattr(token_chunks, "MOST", {"cpu": 4})
  x = jax.random.normal(jax.random.key(0), (5, length, 3))
  with jax.set_mesh(split_mesh(parse_mesh("model:2"), 1)):
    text = str(jax.make_jaxpr(lambda x: map_tokens(jnp.sin, x))(x))
    found = jax.jit(lambda x: map_tokens(jnp.sin, x))(x)
  assert_allclose(found, jnp.sin(x), rtol=1e-6)
  assert (f"length={steps}" in text) == (steps > 0)


def test_chunks_are_computed_apart():
  """So that a function of neighbors gives something else at their ends."""
  x = jnp.arange(4096, dtype=jnp.float32).reshape(1, 4096, 1)
  shifted = map_tokens(lambda x: jnp.roll(x, 1, axis=1), x)
  places = np.flatnonzero(np.asarray(shifted != jnp.roll(x, 1, axis=1)))
  assert_allclose(places, [0, 1024, 2048, 3072])


# Meshes, rows of 32 tokens, and the chunks in which a layer computes them if
# at most 8 tokens of a device are one.
MESHES = {
  "data:1": (3, 12),
  "data:2": (4, 8),
  "model:4": (1, 4),
  "data:2,model:2": (2, 4),
  "model:3": (2, 8),  # devices have all tokens of the residual
  "context:2,model:2": (2, 4),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_layers_on_a_mesh_are_those_of_all_tokens_at_once(mesh, monkeypatch):
  rows, chunks = MESHES[mesh]
  _, model, params = random_llama(**SIZES)
  rng = np.random.default_rng(0)
  prompts = kvjax.Prompts.of(
    [rng.integers(0, 32, 32 - 2 * row).tolist() for row in range(rows)]
  )
  read = frozenset({"queries", "queries_unrotated", "keys_unrotated", "inputs"})

  def layers(params):
    """Hidden states and activations of both layers."""
    pairs = forward_layers(model, params, prompts, read)
    # The next layer donates the states.
    return [(jnp.copy(states), seen) for states, seen in pairs]

  wanted = layers(params)
  monkeypatch.setattr(token_chunks, "MOST", {"cpu": 8})
  jax.clear_caches()
  with jax.set_mesh(split_mesh(parse_mesh(mesh), 1)):
    text = str(jax.make_jaxpr(layers)(params))
    found = layers(params)
  # Layers share a program, with a loop before the attention and one after it.
  steps = [int(steps) for steps in re.findall(r" length=(\d+)\n", text)]
  assert [each for each in steps if each > 2] == [chunks] * 2 * (chunks > 0)
  for (states, activations), (others, expected) in zip(
    found, wanted, strict=True
  ):
    assert_allclose(states, others, atol=1e-5)
    for name in (*read, "keys", "values"):
      given = getattr(activations, name)
      assert_allclose(given, getattr(expected, name), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("mesh", ["data:1", "model:2"])
def test_experts_get_chunks_on_tpus_alone(mesh, monkeypatch):
  """Elsewhere, fewer tokens would fill less of their blocks."""
  model, params = load_decoder(GOLDEN / "qwen3_moe", "float32")
  tokens = jax.random.randint(jax.random.key(3), (1, 32), 1, 60)
  lengths = jnp.full(1, 32)

  def run(params):
    return prompt_hidden(model, params, tokens, lengths)

  def loops(platform):
    """Chunks of a program for a platform, and what it computes."""
    with (
      kernels.use("xla", platform),
      jax.set_mesh(split_mesh(parse_mesh(mesh), 2)),
    ):
      text = str(jax.make_jaxpr(run)(params))
      found = jax.jit(run)(params)
    return re.findall(r" length=(4)\n", text), found

  monkeypatch.setattr(token_chunks, "MOST", {"cpu": 8, "tpu": 8})
  on_cpu, wanted = loops("cpu")
  jax.clear_caches()
  on_tpu, found = loops("tpu")
  assert len(on_tpu) > len(on_cpu) > 0
  assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("length", [24, 25])
def test_gradients_are_those_of_all_tokens_at_once(length, monkeypatch):
  _, model, params = random_llama(**SIZES)
  tokens = jax.random.randint(jax.random.key(2), (2, length), 0, 32)
  lengths = jnp.asarray([length, length - 3], jnp.int32)

  def loss(params):
    hidden = prompt_hidden(model, params, tokens, lengths)
    return jnp.mean(jnp.sin(hidden[:, : length - 3]))

  wanted = jax.jit(jax.grad(loss))(params)
  monkeypatch.setattr(token_chunks, "MOST", {"cpu": 8})
  jax.clear_caches()
  found = jax.jit(jax.grad(loss))(params)
  assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted)) > 1e-3
  jax.tree.map(lambda x, y: assert_allclose(x, y, atol=1e-6), found, wanted)


def test_a_long_prompt_takes_no_more_between_than_a_chunk():
  """Neither the MLP's inner states nor copies of the residual."""
  _, model, params = random_llama(**SIZES)
  length = 8192

  def prefill(params, tokens, lengths):
    return prompt_hidden(model, params, tokens, lengths)

  lowered = jax.jit(prefill).lower(
    params, jnp.zeros((1, length), jnp.int32), jnp.full(1, length)
  )
  temporary = lowered.compile().memory_analysis().temp_size_in_bytes
  inner = 1024 * 4  # bytes of a token in the MLP
  chunk = 2 * 1024 * inner
  assert chunk < temporary < chunk + length * 16 * 4 * 12 < length * inner
