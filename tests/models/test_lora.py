"""Adapters change nothing at first, merge exactly, and lie as their weights."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from kvjax.cache.sharding import parse_mesh
from kvjax.engine.forward import hidden_states, prompt_hidden
from kvjax.errors import InputError
from kvjax.models import lora
from kvjax.models.pretrained import load_decoder
from kvjax.models.weights import write_weights

# It has biases beside some of its kernels.
QWEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers" / "qwen25"
ALL = tuple(lora.TARGETS)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 80, (2, 9), np.int32))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params):
  lengths = jnp.full((2,), 9, jnp.int32)
  return model.logits(params, prompt_hidden(model, params, TOKENS, lengths))


def drawn(params):
  """The same weights with adapters that do something."""
  adapter, frozen = lora.split(params)
  leaves, structure = jax.tree.flatten(adapter)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  new = [
    0.1 * jax.random.normal(key, leaf.shape)
    for key, leaf in zip(keys, leaves, strict=True)
  ]
  return nnx.merge_state(jax.tree.unflatten(structure, new), frozen)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapters_change_nothing_and_are_float32(dtype):
  model, params = load_decoder(QWEN, dtype)
  changed, with_adapters = lora.add_adapters(model, params, 3, ALL, 5)
  np.testing.assert_array_equal(
    logits_of(model, params), logits_of(changed, with_adapters)
  )
  adapter, frozen = lora.split(with_adapters)
  assert {leaf.dtype for leaf in jax.tree.leaves(adapter)} == {
    jnp.dtype("float32")
  }
  # A and B of seven projections in all layers; the weights are all there.
  assert len(jax.tree.leaves(adapter)) == 14
  for leaf in jax.tree.leaves(adapter):
    assert leaf.shape[0] == model.geometry.num_layers
  assert jax.tree.leaves(frozen)[0] is jax.tree.leaves(params)[0]
  assert len(jax.tree.leaves(frozen)) == len(jax.tree.leaves(params))


def test_the_seed_decides_and_the_order_of_targets_does_not():
  model, params = load_decoder(QWEN, "float32")

  def made(targets, seed):
    adapter, _ = lora.split(
      lora.add_adapters(model, params, 2, targets, seed)[1]
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(adapter)]

  one = made(("q", "v"), 5)
  jax.tree.map(np.testing.assert_array_equal, one, made(("v", "q"), 5))
  others = made(("q", "v"), 6)
  assert any((a != b).any() for a, b in zip(one, others, strict=True))


def test_merged_weights_compute_what_the_adapters_do():
  model, params = load_decoder(QWEN, "float32")
  before = jax.tree.map(np.asarray, params)
  changed, with_adapters = lora.add_adapters(model, params, 3, ALL)
  with_adapters = drawn(with_adapters)
  plain, merged = lora.merge_adapters(changed, with_adapters)
  assert plain == model
  assert jax.tree.structure(merged) == jax.tree.structure(params)
  wanted = logits_of(changed, with_adapters)
  np.testing.assert_allclose(logits_of(plain, merged), wanted, atol=1e-5)
  assert np.abs(wanted - logits_of(model, params)).max() > 0.1
  jax.tree.map(np.testing.assert_array_equal, before, params)
  # What was merged can still be used.
  np.testing.assert_array_equal(logits_of(changed, with_adapters), wanted)


def test_the_adapter_file_says_what_was_added_to_the_weights(tmp_path):
  model, params = load_decoder(QWEN, "float32")
  changed, with_adapters = lora.add_adapters(model, params, 3, ("k", "down"))
  with_adapters = drawn(with_adapters)
  adapter = lora.split(with_adapters)[0]
  lora.write_adapter(adapter, model.config, tmp_path, "some/model")
  merged = lora.merge_adapters(changed, with_adapters)[1]
  write_weights(merged, model.config, tmp_path)
  config = json.loads((tmp_path / "adapter_config.json").read_text())
  assert config["target_modules"] == ["down_proj", "k_proj"]
  assert config["r"] == 3
  old = safetensors.numpy.load_file(QWEN / "model.safetensors")
  new = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  adapter = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
  scale = config["lora_alpha"] / config["r"]
  touched = set()
  for name in old:
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    expected = old[name].astype(np.float32)
    if f"{stem}.lora_A.weight" in adapter:
      touched.add(name)
      down, up = (adapter.pop(f"{stem}.lora_{x}.weight") for x in "AB")
      assert down.shape == (3, expected.shape[1])
      expected = expected + scale * up @ down
    np.testing.assert_allclose(new[name], expected, atol=1e-6)
  assert not adapter
  assert len(touched) == 2 * model.geometry.num_layers


def test_methods_read_an_output_projection_with_its_adapter():
  model, params = load_decoder(QWEN, "float32")
  changed, with_adapters = lora.add_adapters(model, params, 3, ("o",))
  with_adapters = drawn(with_adapters)
  plain, merged = lora.merge_adapters(changed, with_adapters)

  def projections(model, params):
    def attend(layer, state, seen):
      return seen.queries, seen.output_projection

    places = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32)[None], (2, 9))
    none = (None,) * model.geometry.num_layers
    return hidden_states(model, params, TOKENS, places, none, attend)[1]

  for one, other, before in zip(
    projections(changed, with_adapters),
    projections(plain, merged),
    projections(model, params),
    strict=True,
  ):
    np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.abs(one - before).max() > 0.01


def test_bfloat16_weights_are_rounded_once():
  model, params = load_decoder(QWEN, "bfloat16")
  changed, with_adapters = lora.add_adapters(model, params, 3, ("q",))
  with_adapters = drawn(with_adapters)
  _, merged = lora.merge_adapters(changed, with_adapters)
  lora_q = nnx.merge(changed.graphdef, with_adapters).layers[0].self_attn.q_proj
  kernel = lora_q.base_module.kernel[...].astype(jnp.float32)
  exact = kernel + lora_q.lora_a[...] @ lora_q.lora_b[...]
  found = merged["layers"][0]["self_attn"]["q_proj"]["kernel"][...]
  np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_on_a_mesh_adapters_are_split_as_their_weights():
  mesh = parse_mesh("data:2,model:2")
  with jax.set_mesh(mesh):
    model, params = load_decoder(QWEN, "float32", mesh)
    changed, with_adapters = lora.add_adapters(model, params, 3, ("q", "down"))
    layers = lora.split(with_adapters)[0]["layers"][0]
    depth = model.geometry.num_layers
    valid = {
      name + matrix: layers[module][name][matrix][...].addressable_shards[0]
      for module, name in (lora.TARGETS["q"], lora.TARGETS["down"])
      for matrix in ("lora_a", "lora_b")
    }
    # Two devices share the outputs of q and the inputs of down.
    assert {name: shard.data.shape for name, shard in valid.items()} == {
      "q_projlora_a": (depth, 32, 3),
      "q_projlora_b": (depth, 3, 32 // 2),
      "down_projlora_a": (depth, 48 // 2, 3),
      "down_projlora_b": (depth, 3, 32),
    }
    _, merged = lora.merge_adapters(changed, with_adapters)
  for new, old in zip(
    jax.tree.leaves(merged), jax.tree.leaves(params), strict=True
  ):
    assert new.sharding == old.sharding


@pytest.mark.parametrize(
  ("rank", "targets", "sentence"),
  [
    (0, ("q",), "The rank of an adapter is 1 or more; it is 0."),
    (2, (), "Name a projection to adapt: q, k, v, o, gate, up, down."),
    (2, ("q", "x"), "There is no projection 'x' to adapt; projections are q, "),
  ],
)
def test_adapters_that_cannot_be_are_refused(rank, targets, sentence):
  model, params = load_decoder(QWEN, "float32")
  with pytest.raises(InputError) as raised:
    lora.add_adapters(model, params, rank, targets)
  assert str(raised.value).startswith(sentence)
