"""What every retrieval method keeps to, alone and in the engine."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.sharding import parse_mesh
from kvjax.cache.sparse import SparseLayer
from kvjax.kernels.attention import attention
from kvjax.kernels.attention.options import AttentionOptions
from kvjax.placement import nbytes_by_memory
from kvjax.registry.names import get_retrieval
from kvjax.registry.registry import RETRIEVALS
from kvjax.retrieval import Candidates, KeyBudget, Store
from kvjax.retrieval.weights import scaled_logits
from kvjax.testing import (
  TinyModel,
  layer_positions,
  poison_layer,
  random_activations,
)

# In sizes that leave much to retrieve from rows this short.
SMALL = {
  "ctkvr": "ctkvr:sinks=2:local=5:probes=2",
  "ctkvr.host": "ctkvr:sinks=2:local=5:probes=2:offload=true",
  "ctkvr.ring": "ctkvr:sinks=2:local=5:probes=2:max_resident=8",
  "flat": "flat:sinks=2:local=5",
  "quest": "quest:dense_layers=",
  "shadowkv": "shadowkv:outliers=2",
  "magicpig": "magicpig:sinks=2:local=5:bits=3:tables=12:dense_every=0",
  "clusterkv": "clusterkv:sinks=2:clusters=7:iterations=3:dense_layers=",
  "squeezed": "squeezed:sinks=2:local=5:window=4:iterations=3",
}
NAMES = [*RETRIEVALS, "ctkvr.ring"]
# The last row has sinks, but fewer tokens than are resident.
LENGTHS = [96, 40, 80, 5]
PADDED = 96
# The second row may read all it has, the first and the third may not.
COUNTS = [30, 50, 24, 9]
MOST = 50
LAYER = 1
STEPS = 3


def small(name):
  return get_retrieval(SMALL.get(name, name))


def activations(seed, lengths=LENGTHS, padded=PADDED, **options):
  return random_activations(
    seed, lengths, padded, heads=6, kv_heads=3, **options
  )


def block_after(lengths, seed=1, **options):
  block = activations(seed, [STEPS] * len(lengths), STEPS, **options)
  starts = jnp.asarray(lengths, jnp.int32)[:, None]
  return dataclasses.replace(block, positions=starts + block.positions)


def indexed(method, prompt, counts):
  cache = LayerCache.of(prompt)
  layer = SparseLayer.of(method, jnp.int32(LAYER), cache, prompt, counts, MOST)
  layer = layer.offload()
  return layer, layer.grow(STEPS)


def decoded(layer, block):
  layer = layer.append(block)
  return layer.attend(block)


compiled_index = jax.jit(indexed, static_argnums=0)
compiled_decode = jax.jit(decoded)


@functools.cache
def of_all_rows(name):
  counts = jnp.asarray(COUNTS, jnp.int32)
  layer, roomy = compiled_index(small(name), activations(0), counts)
  return layer, roomy, *compiled_decode(roomy, block_after(LENGTHS))


def swapped(seen, others):
  """The last two rows first, with other mates after them."""
  return jax.tree.map(
    lambda x, other: jnp.asarray(np.stack([x[3], x[2], *other[:2]])),
    seen,
    others,
  )


def padded_less(seen, padded=84):
  """The last two rows with less padding."""

  def cut(x):
    x = np.asarray(x)[2:]
    return jnp.asarray(x[:, :padded] if x.ndim == 2 else x[:, :, :padded])

  return jax.tree.map(cut, seen)


@pytest.mark.parametrize("name", NAMES)
class TestRetrieval:
  def test_keeps_everything_and_reads_some(self, name):
    layer, _, _, after = of_all_rows(name)
    for row, n in enumerate(LENGTHS):
      assert layer_positions(layer, row) == [[*range(n)]] * 3
      assert layer_positions(after, row) == [[*range(n + STEPS)]] * 3
    np.testing.assert_array_equal(
      layer.lengths, np.repeat(np.asarray(LENGTHS)[:, None], 3, axis=1)
    )
    assert (layer.resident.cursor >= layer.resident.lengths).all()
    assert (layer.num_retrieved[:3] > 0).all()
    reads, lengths = np.asarray(layer.num_attended), np.asarray(layer.lengths)
    assert (reads[1] == lengths[1]).all()
    assert (reads[[0, 2]] < lengths[[0, 2]]).any(axis=1).all()
    leaves = jax.tree.leaves((layer.resident, layer.stored, layer.index))
    own = [layer.count, layer.num_retrieved]
    assert layer.nbytes == sum(leaf.nbytes for leaf in (*leaves, *own))
    assert layer.stored.capacity % 16 == 0  # whole tiles

  def test_a_row_stands_alone(self, name):
    """Whatever its batch mates, and its place among them."""
    _, _, output, after = of_all_rows(name)
    lengths = [LENGTHS[3], LENGTHS[2], *LENGTHS[:2]]
    counts = jnp.asarray([COUNTS[3], COUNTS[2], *COUNTS[:2]], jnp.int32)
    prompt = swapped(activations(0), activations(5))
    _, roomy = compiled_index(small(name), prompt, counts)
    block = swapped(block_after(LENGTHS), block_after(LENGTHS, 6))
    own, left = compiled_decode(roomy, block)
    for row, place in ((3, 0), (2, 1)):
      np.testing.assert_allclose(output[row], own[place], atol=2e-6)
      np.testing.assert_array_equal(
        after.num_retrieved[row], left.num_retrieved[place]
      )
      everything = [*range(lengths[place] + STEPS)]
      assert layer_positions(left, place) == [everything] * 3

  def test_a_row_that_may_read_everything_is_dense(self, name):
    _, _, output, _ = of_all_rows(name)
    block = block_after(LENGTHS)
    cache = LayerCache.of(activations(0)).grow(STEPS).append(block)
    dense = attention(
      block.queries, cache.keys, cache.values, block.positions, cache.positions
    )
    for row in (1, 3):
      np.testing.assert_allclose(output[row], dense[row], atol=2e-6)
    assert np.abs(output[0] - dense[0]).max() > 1e-3

  def test_what_is_empty_has_no_effect(self, name):
    _, roomy, output, _ = of_all_rows(name)
    found, after = compiled_decode(poison_layer(roomy), block_after(LENGTHS))
    np.testing.assert_allclose(found, output, atol=2e-6)
    for leaf in jax.tree.leaves(after.index):
      assert np.isfinite(np.asarray(leaf, np.float32)).all()

  def test_bfloat16_caches_stay_so(self, name):
    def both(prompt, block, counts):
      layer, roomy = indexed(small(name), prompt, counts)
      return layer, *decoded(roomy, block)

    layer, output, after = jax.eval_shape(
      both,
      activations(0, dtype="bfloat16"),
      block_after(LENGTHS, dtype="bfloat16"),
      jnp.asarray(COUNTS, jnp.int32),
    )
    assert output.dtype == layer.stored.keys.dtype == jnp.bfloat16
    assert after.resident.values.dtype == jnp.bfloat16
    for new, old in zip(
      jax.tree.leaves(after.index), jax.tree.leaves(layer.index), strict=True
    ):
      assert (new.shape, new.dtype) == (old.shape, old.dtype)


# Shapes of their own: one whose lists grow with the prompt, one of pages, one
# of hashes, one of clusters.
@pytest.mark.parametrize("name", ["ctkvr", "quest", "magicpig", "clusterkv"])
def test_padding_changes_nothing(name):
  _, _, output, after = of_all_rows(name)
  counts = jnp.asarray(COUNTS[2:], jnp.int32)
  _, roomy = compiled_index(small(name), padded_less(activations(0)), counts)
  block = padded_less(block_after(LENGTHS), STEPS)
  own, left = compiled_decode(roomy, block)
  np.testing.assert_allclose(output[2:], own, atol=2e-6)
  np.testing.assert_array_equal(after.num_retrieved[2:], left.num_retrieved)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  # C' = C, and lists of all stored keys.
  ["ctkvr:sinks=2:local=5:probes=9:list_ratio=9"]
  + [SMALL[name] for name in ("flat", "quest", "clusterkv", "squeezed")],
)
def test_asked_for_as_much_as_there_is_it_finds_it_all(name):
  method = get_retrieval(name)
  counts = jnp.asarray(COUNTS, jnp.int32)
  layer, _ = compiled_index(method, activations(0), counts)
  store = Store(layer.stored.keys[:1], layer.stored.valid[:1])
  valid = int(store.valid[0, 0].sum())
  assert valid > COUNTS[0]
  queries = activations(1).queries[:1, :, 0].reshape(1, 3, 2, 8)
  reads = KeyBudget(jnp.full((1, 3), valid, jnp.int32), valid)

  def retrieve(index, queries, store, reads):
    if method.key_access == "candidates":
      named = method.candidates(index, queries, store)
      keys = jnp.where(named[:, None] >= 0, store.keys[named], 0.0)
      logits = scaled_logits(queries, keys)
      store = dataclasses.replace(store, candidates=Candidates(named, logits))
    return method.retrieve(index, queries, store, reads)[0]

  index = jax.tree.map(lambda x: x[:1], layer.index)
  found = jax.jit(jax.vmap(jax.vmap(retrieve)))(index, queries, store, reads)
  for slots in np.asarray(found.slots).reshape(-1, found.slots.shape[-1]):
    assert (
      sorted(slots[slots >= 0]) == np.flatnonzero(store.valid[0, 0]).tolist()
    )


@pytest.mark.slow
# One that gathers what it looks at on the host, one that needs all of it.
# The first attends by the logits that rank, whose products are of one shape on
# the device and of another on the host.
@pytest.mark.parametrize(("name", "rounding"), [("ctkvr", 1e-6), ("flat", 0)])
def test_what_the_host_holds_is_read_alike(name, rounding):
  """All that is retrieved stays there."""
  method = dataclasses.replace(small(name), offload=True)
  counts = jnp.asarray(COUNTS, jnp.int32)
  layer, roomy = compiled_index(method, activations(0), counts)
  output, after = compiled_decode(roomy, block_after(LENGTHS))
  here, _, expected, _ = of_all_rows(name)
  np.testing.assert_allclose(output, expected, rtol=0, atol=rounding)
  there = here.stored.keys.nbytes + here.stored.values.nbytes
  for state in (layer, after):
    found = nbytes_by_memory(state)
    assert found["pinned_host"] == there
    assert found["device"] == state.nbytes - there
    np.testing.assert_array_equal(state.stored.keys, here.stored.keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ctkvr", "shadowkv"])
def test_looking_up_takes_the_scale_of_the_layer(name):
  """As if the queries were so much longer."""
  scale = 3 * 8**-0.5
  counts = jnp.asarray(COUNTS, jnp.int32)
  scaled, longer = (
    [
      dataclasses.replace(seen, attention=AttentionOptions(scale=scale)),
      dataclasses.replace(seen, queries=3 * seen.queries),
    ]
    for seen in (activations(0), block_after(LENGTHS))
  )
  one, other = (
    compiled_decode(compiled_index(small(name), prompt, counts)[1], block)
    for prompt, block in zip(scaled, longer, strict=True)
  )
  np.testing.assert_allclose(one[0], other[0], atol=2e-6)
  for after, expected in zip(
    jax.tree.leaves(one[1].index), jax.tree.leaves(other[1].index), strict=True
  ):
    np.testing.assert_allclose(after, expected, rtol=1e-5)


def primitives(jaxpr):
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    for part in jaxprs_in_params(equation.params):
      yield from primitives(part)


def test_a_lone_token_retrieval_as_the_first_of_several_does():
  """Without a branch in which the device would only wait for the host."""
  _, roomy, output, _ = of_all_rows("ctkvr.host")
  first = jax.tree.map(
    lambda x: x[:, :1] if x.ndim == 2 else x[:, :, :1], block_after(LENGTHS)
  )
  traced = jax.jit(decoded).trace(roomy, first)
  assert "cond" not in primitives(traced.jaxpr.jaxpr)
  own, _ = traced.lower().compile()(roomy, first)
  np.testing.assert_allclose(own, output[:, :, :1], atol=2e-6)


MODEL = TinyModel(
  kvjax.Geometry.uniform(
    layers=1, heads=4, kv_heads=2, head_dim=8, max_positions=4096
  )
)
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
ROWS = [RNG.permutation(64)[:n].tolist() for n in (60, 44, 63, 52)]
QUESTIONS = kvjax.Prompts.of([[5, 6], [7], [1, 2, 3], [9]])
DECODING = kvjax.Decoding(4)
BUDGET = kvjax.Tokens(10)


def plans(names):
  return [kvjax.get_plan(SMALL.get(name, name), BUDGET) for name in names]


@functools.cache
def swept(name):
  rows = kvjax.Prompts.of(ROWS)
  (cache,), _ = kvjax.sweep(MODEL, PARAMS, rows, plans([name]))
  return cache


# Compiling takes long: one that learns from tokens, one that does not.
KINDS = ["ctkvr.host", "quest"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_cache_is_asked_again_and_talked_to(name):
  """Answers leave it as it was; a conversation carries the index on."""
  cache = swept(name)
  once = kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, DECODING)
  again = kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, DECODING)
  np.testing.assert_array_equal(once.tokens, again.tokens)
  roomy = kvjax.reserve(cache, 3 * 36)
  pointers = [leaf.unsafe_buffer_pointer() for leaf in buffers(roomy)]
  first = kvjax.generate(MODEL, PARAMS, roomy, QUESTIONS, DECODING, keep=True)
  after = first.cache
  np.testing.assert_array_equal(once.tokens, first.tokens)
  kept = [leaf.unsafe_buffer_pointer() for leaf in buffers(after)]
  assert pointers == kept
  assert after.nbytes_by_memory == roomy.nbytes_by_memory
  on_host = [c.nbytes_by_memory["pinned_host"] for c in (cache, after)]
  assert on_host[0] == on_host[1]
  assert (on_host[0] > 0) == name.endswith(".host")
  assert (after.lengths > cache.lengths).all()


def buffers(cache):
  """Keys and values, which a conversation does not copy."""
  parts = [
    part for stack in cache.stacks for part in (stack.stored, stack.resident)
  ]
  return [leaf for part in parts for leaf in (part.keys, part.values)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_saved_caches_come_back(name, tmp_path):
  cache = swept(name)
  identity = {"model": MODEL, "model_id": "tiny"}
  kvjax.save_cache(cache, tmp_path / "cache", **identity)
  loaded = kvjax.load_cache(tmp_path / "cache", **identity)
  assert jax.tree.structure(loaded) == jax.tree.structure(cache)
  jax.tree.map(np.testing.assert_array_equal, loaded, cache)


@pytest.mark.slow
def test_four_devices_equal_one():
  alone = {
    name: kvjax.generate(MODEL, PARAMS, swept(name), QUESTIONS, DECODING)
    for name in KINDS
  }
  mesh = parse_mesh("data:2,model:2")
  with jax.set_mesh(mesh):
    prompts = kvjax.Prompts.of(ROWS)
    caches, _ = kvjax.sweep(MODEL, PARAMS, prompts, plans(KINDS))
    for name, cache in zip(KINDS, caches, strict=True):
      keys = cache.stacks[0].stored.keys
      assert keys.sharding.shard_shape(keys.shape)[:3] == (1, 2, 1)
      roomy = kvjax.reserve(cache, 8)
      before, after = cache.nbytes_by_memory, roomy.nbytes_by_memory
      assert before["pinned_host"] == after["pinned_host"]
      assert (before["pinned_host"] > 0) == name.endswith(".host")
      assert before["device"] < after["device"]
      found = kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, DECODING)
      np.testing.assert_array_equal(found.tokens, alone[name].tokens)


def test_what_an_eviction_method_kept_is_looked_up_in():
  plan = kvjax.get_plan("flat:sinks=2:local=5/keydiff@0.5", BUDGET)
  (cache, only), _ = kvjax.sweep(
    MODEL,
    PARAMS,
    kvjax.Prompts.of(ROWS),
    [plan, kvjax.Plan(plan.method, plan.budget)],
  )
  for row in range(len(ROWS)):
    for layer, evicted in zip(cache.layers, only.layers, strict=True):
      assert layer_positions(layer, row) == layer_positions(evicted, row)
  assert (cache.num_attended < cache.lengths).all()
