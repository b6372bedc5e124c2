"""Decoding changes a retrieval index where it is: no array of it is copied."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.cache.cache import Cache
from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.engine import generate
from kvjax.engine.decode import DecodingInputs
from kvjax.model import Geometry
from kvjax.registry.names import get_retrieval
from kvjax.struct import tree_bytes
from kvjax.testing import TinyModel, random_activations

LENGTH, MOST, TOKENS = 1024, 16, 20
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 32}
# Most of their bytes are in the arrays that every token changes.
METHODS = {
  "ctkvr": "ctkvr:centroids=512",
  "ctkvr on the host": "ctkvr:centroids=512:offload=true",
  "ctkvr with a ring": "ctkvr:centroids=512:max_resident=128",
  "squeezed": "squeezed:window=512:iterations=2",
}


def cache_of(layers, name):
  """A cache of equal layers."""
  prompt = random_activations(0, [LENGTH], LENGTH, **SHAPE)
  layer = SparseLayer.of(
    get_retrieval(METHODS[name]),
    jnp.int32(1),
    LayerCache.of(prompt),
    prompt,
    jnp.asarray([MOST], jnp.int32),
    MOST,
  ).grow(32)
  stack = jax.tree.map(lambda x: jnp.stack([x] * layers), layer).offload()
  return Cache((stack,), jnp.zeros(1, "int32"), order=(0,) * layers)


def compiled(layers, name, width):
  """A turn of `width` tokens and its answer, and the stack of all layers."""
  model = TinyModel(Geometry.uniform(layers, *SHAPE.values(), 4096))
  cache = jax.eval_shape(functools.partial(cache_of, layers, name))
  numbers = functools.partial(jax.ShapeDtypeStruct, dtype="int32")
  inputs = jax.eval_shape(
    lambda: DecodingInputs(jnp.zeros(1, "int32"), None, None, jnp.int32(TOKENS))
  )
  program = generate._generate_and_keep.lower(
    model,
    jax.eval_shape(model.init),
    None,
    cache,
    None,
    (numbers((1, width)), numbers((1,))),
    inputs,
    decoding=kvjax.Decoding(TOKENS),
  ).compile()
  return program, cache.stacks[0]


def copies(program, stack):
  """Instructions that copy all layers of a large array, also of stored keys."""
  arrays = stack.index, stack.stored.keys, stack.stored.values
  large = [x for x in jax.tree.leaves(arrays) if x.size > 1000]
  shapes = {",".join(map(str, x.shape)) for x in large}
  copied = re.findall(r"\w+\[([\d,]+)\]\S* copy\(", program.as_text())
  return [shape for shape in copied if shape in shapes]


def temporary(program):
  return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("name", METHODS)
def test_no_array_of_an_index_is_copied(name, width):
  program, stack = compiled(8, name, width)
  assert not copies(program, stack)
  assert temporary(program) < tree_bytes(stack.index) / 2


def test_unordered_reads_and_writes_would_copy_it(monkeypatch):
  """What the test above looks for does happen."""
  monkeypatch.setattr("kvjax.cache.index.after", lambda place, read: place)
  program, stack = compiled(7, "squeezed", 1)
  assert copies(program, stack)
  assert temporary(program) > tree_bytes(stack.index) / 2
