"""A layer in a stack does what it does alone, and the others stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.packed import PackedLayer
from kvjax.cache.sparse import SparseLayer
from kvjax.cache.window import WindowLayer
from kvjax.registry.names import get_retrieval
from kvjax.testing import TinyModel, random_activations

LENGTHS, PADDED, STEPS = [40, 33], 40, 3
RETRIEVALS = {
  "ctkvr": "ctkvr:sinks=2:local=5:probes=2",
  "ctkvr on the host": "ctkvr:sinks=2:local=5:probes=2:offload=true",
  "ctkvr with a ring": "ctkvr:sinks=2:local=5:probes=2:max_resident=8",
  "ctkvr, dense turns": "ctkvr:sinks=2:local=5:turn=dense",
  "flat": "flat:sinks=2:local=5",
  "flat on the host": "flat:sinks=2:local=5:offload=true",
  "quest": "quest:dense_layers=",
}


def whole(prompt):
  return LayerCache.of(prompt)


def in_eight_bits(prompt):
  return LayerCache.of(prompt).quantize("int8")


def packed(prompt, kv_dtype=None):
  number = jnp.arange(PADDED)[None, None]
  limits = jnp.asarray([[30, 5], [12, 20]])[..., None]
  slots = jnp.where(number < limits, number, -1).astype(jnp.int32)
  layer = PackedLayer.of(LayerCache.of(prompt), slots, 40, page=8)
  return layer.quantize(kv_dtype) if kv_dtype else layer


def local(prompt):
  return WindowLayer.of(prompt, 16)


def sparse(name, prompt):
  layer = SparseLayer.of(
    get_retrieval(RETRIEVALS[name]),
    jnp.int32(1),
    LayerCache.of(prompt),
    prompt,
    jnp.asarray([8, 8], jnp.int32),
    8,
  )
  return layer


KINDS = {
  "whole": whole,
  "int8": in_eight_bits,
  "packed": packed,
  "packed int8": functools.partial(packed, kv_dtype="int8"),
  "local": local,
} | {name: functools.partial(sparse, name) for name in RETRIEVALS}


def block(seed, steps):
  """What follows the prompts; the second row has a token less."""
  lengths = [steps, max(steps - 1, 1)]
  drawn = random_activations(seed, lengths, steps)
  start = jnp.asarray(LENGTHS, jnp.int32)[:, None]
  positions = jnp.where(drawn.positions >= 0, start + drawn.positions, -1)
  changes = {name: jnp.nan_to_num(getattr(drawn, name)) for name in PROJECTED}
  return type(drawn)(**changes, positions=positions)


PROJECTED = ("queries", "keys", "values")


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_steps_as_it_does_alone(kind, steps):
  make = jax.jit(lambda prompt: KINDS[kind](prompt).grow(STEPS).offload())
  layers = [make(random_activations(s, LENGTHS, PADDED)) for s in range(3)]
  stack = jax.tree.map(lambda *x: jnp.stack(x), *map(on_device, layers))
  stack = stack.offload()
  step = jax.jit(type(stack).step)
  new = block(9, steps)
  expected, alone = step(layers[1], new, None)
  output, after = step(stack, new, jnp.int32(1))
  np.testing.assert_allclose(output, expected, atol=2e-6)
  assert np.isfinite(output).all()
  for number, layer in enumerate((layers[0], alone, layers[2])):
    same(on_device(after).at(number), on_device(layer))


def on_device(tree):
  return jax.device_put(tree, jax.memory.Space.Device)


def same(found, expected):
  """Bit by bit, but for sums in another order."""
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    one, other = (np.asarray(x, np.float64) for x in (one, other))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_has_the_sizes_of_its_layers(kind, monkeypatch):
  """Without a look at its tokens, as every turn asks for them."""
  prompt = random_activations(0, LENGTHS, PADDED)
  layer = jax.jit(lambda prompt: KINDS[kind](prompt).grow(STEPS))(prompt)
  stack = jax.tree.map(lambda x: x[None], on_device(layer))
  heads, dim = layer.lengths.shape[-1], prompt.keys.shape[-1]
  window = 16 if kind == "local" else None
  expected = (heads, dim, prompt.values.shape[-1], window)
  for name in ("eval_shape", "jit"):
    monkeypatch.setattr(jax, name, None)
  with jax.disable_jit(), jax.transfer_guard("disallow"):
    assert layer.sizes == stack.sizes == expected


@pytest.mark.parametrize(
  ("plan", "most"),
  [("adakv", 1), ("ctkvr", 1), ("ctkvr:offload=true", 1), ("pyramidkv", 8)],
)
def test_layers_of_a_deep_model_are_in_few_stacks(plan, most):
  """What a decoding step compiles follows them, not the depth."""
  depth = 24
  model = TinyModel(kvjax.Geometry.uniform(depth, 4, 2, 8, 4096))
  prompts = kvjax.Prompts.of([[n % 64 for n in range(400)]])
  kept = kvjax.get_plan(plan, kvjax.Tokens(100))
  cache, _ = kvjax.prefill(model, model.init(), prompts, kept)
  assert len(cache.order) == depth
  assert len(cache.stacks) == len({*cache.order}) <= most
  held = np.asarray(cache.lengths).sum(axis=(1, 2))
  total = 400 if kept.sparse else 100
  assert held.sum() == 2 * total * depth
  assert (len(set(held.tolist())) > most) == (plan == "pyramidkv")
