"""Keys on the host: ranked and read there, as a device would; what crosses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from kvjax.cache.layers import LayerCache
from kvjax.cache.sparse import SparseLayer
from kvjax.kernels.attention.options import AttentionOptions
from kvjax.placement import is_on_host
from kvjax.registry.names import get_retrieval
from kvjax.testing import random_activations

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 32}
# The third row may read all of its stored tokens.
LENGTHS, COUNTS, STEPS = [300, 211, 39], [12, 30, 32], 4
CTKVR = "ctkvr:sinks=2:local=5:probes=3:centroids=20"
VARIANTS = {
  "reranked": CTKVR,
  "all that is recalled": f"{CTKVR}:rerank=false",
  "no update": f"{CTKVR}:update=false",
  "all, no update": f"{CTKVR}:rerank=false:update=false",
  # The first centroids rank few keys, so that lists lack some.
  "short lists": f"{CTKVR}:causal=true:choice=init",
}
OPTIONS = AttentionOptions(scale=0.3, softcap=5.0)


@functools.cache
def layer_of(name, dtype="float32"):
  """A layer with its index, with room for more tokens."""
  prompt = random_activations(0, LENGTHS, max(LENGTHS), dtype=dtype, **SHAPE)
  count = jnp.asarray(COUNTS, jnp.int32)
  layer = jax.jit(SparseLayer.of, static_argnums=(0, 5))(
    get_retrieval(name),
    jnp.int32(1),
    LayerCache.of(prompt),
    prompt,
    count,
    max(COUNTS),
  )
  return layer.grow(STEPS)


def on_host(layer):
  method = dataclasses.replace(layer.retrieval, offload=True)
  return dataclasses.replace(layer, retrieval=method).offload()


def block(steps, dtype="float32"):
  """Tokens that follow the prompts; the first row has one less."""
  lengths = [max(steps - 1, 1), steps, steps]
  drawn = random_activations(1, lengths, steps, dtype=dtype, **SHAPE)
  starts = jnp.asarray(LENGTHS, jnp.int32)[:, None]
  positions = jnp.where(drawn.positions >= 0, starts + drawn.positions, -1)
  return dataclasses.replace(drawn, positions=positions)


def step(layer, tokens):
  output, layer = layer.step(tokens, None)
  return output, layer.index


@pytest.mark.parametrize(
  ("name", "steps", "dtype"),
  [
    *((name, 1, "float32") for name in VARIANTS),
    ("reranked", STEPS, "float32"),
    # The scale must not round queries.
    ("reranked", 1, "bfloat16"),
  ],
)
def test_hosts_read_and_list_what_devices_do(name, steps, dtype):
  tokens = dataclasses.replace(block(steps, dtype), attention=OPTIONS)
  here = layer_of(VARIANTS[name], dtype)
  there = on_host(here)
  assert is_on_host(there.stored.keys)
  assert not is_on_host(here.stored.keys)
  expected, index = jax.jit(step)(here, tokens)
  output, own = jax.jit(step)(there, tokens)
  atol = 1e-5 if dtype == "float32" else 2**-8
  output, expected = (x.astype("float32") for x in (output, expected))
  np.testing.assert_allclose(output, expected, atol=atol)
  assert np.isfinite(output[:2]).all()
  jax.tree.map(np.testing.assert_array_equal, own, index)


def test_a_row_that_may_read_all_of_its_keys_reads_those_no_list_has():
  layer = layer_of(VARIANTS["short lists"])
  assert layer.stored.lengths[2].tolist() == [COUNTS[2]] * 2
  assert layer.num_retrieved[2].tolist() == [COUNTS[2]] * 2


def equations(jaxpr):
  for equation in jaxpr.eqns:
    yield equation
    for part in jaxprs_in_params(equation.params):
      yield from equations(part)


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_token_reads_a_key_once(where):
  """Attention takes the logits by which the keys were ranked."""
  layer = layer_of(CTKVR)
  if where == "host":
    layer = on_host(layer)
  program = jax.jit(step).trace(layer, block(1))
  gathers = [
    equation.invars[0].aval.shape
    for equation in equations(program.jaxpr.jaxpr)
    if equation.primitive.name == "gather"
  ]
  # Keys and values have the same shape; a stack of one layer.
  assert gathers.count((1, *layer.stored.keys.shape)) == 2


def nbytes(avals):
  return sum(aval.size * aval.dtype.itemsize for aval in avals)


def test_only_queries_slots_and_the_attention_cross():
  layer = on_host(layer_of(CTKVR, "bfloat16"))
  program = jax.jit(step).trace(layer, block(1, "bfloat16"))
  to_host = to_device = calls = 0
  for equation in equations(program.jaxpr.jaxpr):
    results = [variable.aval for variable in equation.outvars]
    if equation.primitive.name == "compute_on":
      calls += 1
      to_device += nbytes(results)
    elif equation.primitive.name == "device_put":
      spaces = {aval.memory_space for aval in results}
      assert spaces == {jax.memory.Space.Host}
      to_host += nbytes(results)
  batch, heads, dim = 3, SHAPE["heads"], SHAPE["head_dim"]
  kv_heads, stored = SHAPE["kv_heads"], layer.stored.capacity
  # Queries in their own dtype; for each KV head its candidates and two counts;
  # and the numbers of the places, -inf, zero and the layer.
  candidates = min(3 * 80, stored)
  assert to_host == (
    2 * batch * heads * dim
    + 4 * batch * kv_heads * (candidates + 2)
    + 4 * candidates
    + 4
    + 2
    + 4
  )
  # The output in float32, the largest logit and the total; the new lists.
  listed = 80
  assert to_device == 4 * (
    batch * heads * (dim + 2) + batch * kv_heads * listed
  )
  assert calls == 1
