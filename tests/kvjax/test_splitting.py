"""Stored slots fill up tiles, which changes nothing that a token reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import splitting
from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.registry.names import get_retrieval
from kvjax.testing import layer_positions, poison_layer, random_activations

# Pages that do and do not divide a tile; a ring that stores all new tokens.
METHODS = {
  "ctkvr": "ctkvr:sinks=2:local=5:probes=2",
  "ctkvr with a ring": "ctkvr:sinks=2:local=5:probes=2:max_resident=8",
  "flat": "flat:sinks=2:local=5",
  "quest": "quest:dense_layers=",
  "shadowkv": "shadowkv:outliers=2:page=3:local=1",
  "magicpig": "magicpig:sinks=2:local=5:bits=3:tables=12:dense_every=0",
  "clusterkv": "clusterkv:sinks=2:clusters=7:iterations=3:dense_layers=",
  "squeezed": "squeezed:sinks=2:local=5:window=4:iterations=3",
}
# One row fills its slots, one may read all it has, one has few tokens.
LENGTHS, PADDED = [91, 40, 12], 91
COUNTS, MOST = [30, 50, 9], 50
STEPS = 9
make = functools.partial(random_activations, heads=6, kv_heads=3)


def prefilled(method, prompt):
  counts = jnp.asarray(COUNTS, jnp.int32)
  layer = SparseLayer.of(
    method, jnp.int32(1), LayerCache.of(prompt), prompt, counts, MOST
  )
  assert layer is not None
  return poison_layer(layer)


def blocks():
  """Tokens of all rows after the prompt, one by one."""
  lengths = jnp.asarray(LENGTHS, jnp.int32)[:, None]
  for step in range(STEPS):
    block = make(1 + step, [1] * len(LENGTHS), 1)
    yield dataclasses.replace(block, positions=lengths + step)


def in_tiles(size, name, monkeypatch):
  """The layer after the prompt and after some tokens, and their outputs."""
  monkeypatch.setattr(splitting, "_TILE", size)
  prompt = make(0, LENGTHS, PADDED)
  # A new function for each size, or JAX would not trace it again.
  layer = jax.jit(functools.partial(prefilled, get_retrieval(METHODS[name])))(
    prompt
  )
  decode = jax.jit(lambda layer, block: layer.append(block).attend(block))
  after, outputs = layer.grow(STEPS), []
  for block in blocks():
    output, after = decode(after, block)
    outputs.append(output)
  return layer, after, outputs


@pytest.mark.parametrize("name", METHODS)
def test_stored_slots_fill_up_tiles(name, monkeypatch):
  """A TPU would copy all of them if the last tile were not whole."""
  size = splitting._TILE
  layer, after, outputs = in_tiles(size, name, monkeypatch)
  plain, plain_after, expected = in_tiles(1, name, monkeypatch)
  assert layer.stored.capacity % 16 == 0
  assert 0 < layer.stored.capacity - plain.stored.capacity < 16
  assert layer.capacity == plain.capacity
  for one, other in ((layer, plain), (after, plain_after)):
    np.testing.assert_array_equal(one.num_attended, other.num_attended)
    np.testing.assert_array_equal(one.next_slot, other.next_slot)
    for row in range(len(LENGTHS)):
      assert layer_positions(one, row) == layer_positions(other, row)
  for output, other in zip(outputs, expected, strict=True):
    np.testing.assert_allclose(output, other, atol=2e-6)
