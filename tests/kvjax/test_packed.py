"""Packed layers against dense caches in which each head sees its own slots."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.packed import PAGE as DEFAULT_PAGE
from kvjax.cache.packed import PackedLayer, page_count
from kvjax.cache.sharding import parse_mesh
from kvjax.kernels.attention import attention
from kvjax.testing import TinyModel, poison_layer, random_activations

LENGTHS = [37, 61]
PADDED = 64
PAGE = 8


def ragged(counts, seed=0):
  """Slots of heads that keep so many of each row's tokens."""
  rng = np.random.default_rng(seed)
  counts = np.asarray(counts)
  slots = np.full((*counts.shape, counts.max()), -1, np.int32)
  for b, j in np.ndindex(counts.shape):
    chosen = rng.permutation(LENGTHS[b])[: counts[b, j]]
    slots[b, j, : counts[b, j]] = np.sort(chosen)
  return jnp.asarray(slots)


def some(K, G=2, dtype="float32"):
  """A block, and slots of which one head has none and one nearly all."""
  seen = random_activations(
    0, LENGTHS, PADDED, heads=K * G, kv_heads=K, dtype=dtype
  )
  counts = np.array([[29, 0, 9][:K], [3, 60, 0][:K]])
  return seen, ragged(counts), int(counts.sum(axis=1).max())


@jax.jit
def expected(q, places, caches, kept):
  """Attention to dense caches, masked: the slots of each head that it kept."""
  positions = [
    jnp.where(own, cache.positions, -1)
    for cache, own in zip(caches, kept, strict=True)
  ]
  return attention(
    q,
    jnp.concatenate([cache.keys for cache in caches], axis=2),
    jnp.concatenate([cache.values for cache in caches], axis=2),
    places,
    jnp.concatenate(positions, axis=2),
    "reference",
  )


def mask(slots, width=PADDED):
  slots = np.asarray(slots)
  kept = np.zeros((*slots.shape[:2], width), bool)
  for b, j in np.ndindex(slots.shape[:2]):
    kept[b, j, slots[b, j][slots[b, j] >= 0]] = True
  return kept


def following(seen, S, seed=1):
  """A block of up to S tokens after each row, the last row's shorter."""
  block = random_activations(
    seed,
    [S, max(S - 2, 1)],
    S,
    heads=seen.queries.shape[1],
    kv_heads=seen.keys.shape[1],
    dtype=seen.keys.dtype.name,
  )
  places = block.positions + jnp.asarray(LENGTHS, jnp.int32)[:, None]
  return dataclasses.replace(
    block, positions=jnp.where(block.positions >= 0, places, -1)
  )


def close(ours, theirs, dtype="float32"):
  tolerance = 1e-5 if dtype == "float32" else 2e-2
  np.testing.assert_allclose(
    np.asarray(ours, np.float32),
    np.asarray(theirs, np.float32),
    rtol=0 if dtype == "float32" else tolerance,
    atol=tolerance,
  )


@pytest.mark.parametrize(
  ("K", "G", "S", "dtype"),
  [
    (1, 4, 1, "float32"),
    (1, 4, 5, "bfloat16"),
    (2, 2, 1, "bfloat16"),
    (2, 2, 5, "float32"),
    (3, 1, 1, "float32"),
    (3, 1, 5, "bfloat16"),
  ],
)
def test_attends_as_a_masked_dense_cache(K, G, S, dtype):
  seen, slots, total = some(K, G, dtype)
  cache = LayerCache.of(seen)
  block = following(seen, S)

  @jax.jit
  def run(cache, slots, block):
    packed = poison_layer(PackedLayer.of(cache, slots, total, PAGE))
    return packed.attend(block)[0]

  ours = run(cache, slots, block)
  close(
    ours,
    expected(block.queries, block.positions, [cache], [mask(slots)]),
    dtype,
  )


@pytest.mark.parametrize(("K", "dtype"), [(1, "bfloat16"), (3, "float32")])
def test_appended_tokens_are_seen_too(K, dtype):
  seen, slots, total = some(K, dtype=dtype)
  cache = LayerCache.of(seen)

  @jax.jit
  def run(cache, slots, block):
    packed = PackedLayer.of(cache, slots, total, PAGE).grow(9).append(block)
    return packed, packed.attend(block)[0]

  block = following(seen, 5)
  packed, ours = run(cache, slots, block)
  tail = LayerCache.of(block)
  kept = [mask(slots), np.ones(tail.positions.shape, bool)]
  theirs = expected(block.queries, block.positions, [cache, tail], kept)
  close(ours, theirs, dtype)
  assert packed.capacity == 9
  assert int(packed.next_slot) == 5
  counts = np.sum(slots >= 0, axis=-1) + np.array([[5], [3]])
  np.testing.assert_array_equal(packed.lengths, counts)


def test_pages_hold_the_given_slots_in_order():
  seen, slots, total = some(3)
  cache = LayerCache.of(seen)
  pages = PackedLayer.of(cache, slots, total, PAGE).pages
  heads, positions = np.asarray(pages.heads), np.asarray(pages.positions)
  for b, j in np.ndindex(2, 3):
    own = positions[b, heads[b] == j].reshape(-1)
    given = np.asarray(slots[b, j][slots[b, j] >= 0])
    assert own[own >= 0].tolist() == given.tolist()  # positions are slots here
    assert np.all(own[len(given) :] == -1)
    assert len(own) == -(-len(given) // PAGE) * PAGE
    valid = pages.keys[b, heads[b] == j].reshape(-1, 8)[: len(given)]
    np.testing.assert_array_equal(valid, cache.keys[b, j, given])
  assert np.all(positions[heads < 0] == -1)
  np.testing.assert_array_equal(pages.lengths(3), np.sum(slots >= 0, axis=-1))


@pytest.mark.parametrize("page", [1, 3, 4])
def test_pages_suffice_and_none_can_be_spared(page):
  for K, total in itertools.product((1, 2, 3), range(3, 15)):
    shares = itertools.product(range(total + 1), repeat=K)
    needed = max(
      sum(-(-n // page) for n in share)
      for share in shares
      if sum(share) == total
    )
    assert page_count(total, K, page) == needed


def test_bytes_follow_the_budgets():
  K, D, page = 2, 8, 64
  seen = random_activations(0, [700], 700, kv_heads=K, head_dim=D)
  cache = LayerCache.of(seen)
  slots = np.full((1, K, 600), -1, np.int32)
  slots[0, 0] = np.arange(600)
  slots[0, 1, :8] = np.arange(8)
  packed = PackedLayer.of(cache, jnp.asarray(slots), 608, page)
  pages = (608 + K * 63) // 64  # 600 and 8 tokens take 10 and 1
  assert pages == 11
  tail_cursor = 4
  assert packed.nbytes == pages * (page * (2 * D * 4 + 4) + 4) + tail_cursor
  assert packed.nbytes == sum(x.nbytes for x in jax.tree.leaves(packed))
  assert packed.nbytes < 0.6 * cache.take(jnp.asarray(slots)).nbytes
  grown = packed.grow(10)
  assert grown.nbytes - packed.nbytes == 10 * K * (2 * D * 4 + 4)


def test_nothing_as_large_as_the_fullest_head_times_heads_is_made():
  K, T, M, D, total = 8, 4096, 2048, 64, 2048 + 7 * 8
  shape = jax.ShapeDtypeStruct
  seen = random_activations(0, [1], 1, kv_heads=K, head_dim=D)
  cache = jax.eval_shape(lambda: LayerCache.of(seen).grow(T - 1))
  slots = shape((1, K, M), "int32")
  build = jax.jit(lambda cache, slots: PackedLayer.of(cache, slots, total, 64))
  memory = build.lower(cache, slots).compile().memory_analysis()
  padded = K * M * D * 4  # the keys alone
  pages = page_count(total, K, 64)
  made = pages * (64 * (2 * D * 4 + 4) + 4)
  slack = 512  # alignment
  assert made <= memory.output_size_in_bytes <= made + slack
  assert memory.temp_size_in_bytes < padded / 10
  dense = jax.jit(LayerCache.take).lower(cache, slots).compile()
  assert dense.memory_analysis().output_size_in_bytes >= 2 * padded
  assert 3 * made < 2 * padded


def test_attending_takes_memory_by_the_page():
  K, D, total, page = 8, 64, 2104, 64
  pages = page_count(total, K, page)
  shape = jax.ShapeDtypeStruct
  seen = random_activations(0, [1], 1, heads=16, kv_heads=K, head_dim=D)
  layer = jax.eval_shape(
    lambda cache, slots: PackedLayer.of(cache, slots, total, page),
    LayerCache.of(seen),
    shape((1, K, 2048), "int32"),
  )
  compiled = (
    jax.jit(PackedLayer.attend).lower(layer, jax.eval_shape(lambda: seen))
  ).compile()
  values = pages * page * D * 4
  assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * values
  assert 2.5 * values < K * 2048 * D * 4


def test_four_devices_equal_one():
  seen, slots, total = some(2)
  block = following(seen, 5)

  @jax.jit
  def run(seen, slots, block):
    packed = PackedLayer.of(LayerCache.of(seen), slots, total, PAGE)
    packed = packed.grow(5).append(block)
    return packed.attend(block)[0]

  one = run(seen, slots, block)
  mesh = parse_mesh("data:2,model:2")
  spec = jax.sharding.PartitionSpec
  with jax.set_mesh(mesh):
    args = jax.tree.map(
      lambda x: jax.device_put(
        x,
        jax.sharding.NamedSharding(
          mesh, spec("data", "model") if x.ndim > 2 else spec("data")
        ),
      ),
      (seen, jnp.asarray(slots), block),
    )
    four = run(*args)
  close(one, four)


HEADS = 4
MODEL = TinyModel(
  kvjax.Geometry.uniform(
    layers=2, heads=HEADS, kv_heads=HEADS, head_dim=8, max_positions=999
  )
)


def test_devices_share_the_pages_of_a_model():
  params = MODEL.init()
  prompts = kvjax.Prompts.of([list(range(60)), list(range(50))])
  plan = kvjax.get_plan("ada/snapkv:window=8", kvjax.Tokens(48))
  question = kvjax.Prompts.of([[1, 2, 3], [4]])

  def ask():
    cache, _ = kvjax.prefill(MODEL, params, prompts, plan)
    answers = kvjax.generate(MODEL, params, cache, question, kvjax.Decoding(4))
    return cache.stacks[0].pages.keys, answers.rows()

  one, expected = ask()
  with jax.set_mesh(parse_mesh("model:4")):
    four, found = ask()
  assert found == expected
  # Rounded up, so that each device has as many.
  assert one.shape[2] % 4
  assert four.shape[2] == -(-one.shape[2] // 4) * 4
  shard = four.sharding.shard_shape(four.shape)
  assert shard == (*four.shape[:2], four.shape[2] // 4, *four.shape[3:])


@pytest.fixture(scope="module")
def prefilled():
  """Caches of two methods whose heads differ: one of them attends sharply."""
  params = MODEL.init()
  sharpness = jnp.repeat(jnp.asarray([0.2, 0.2, 4.0, 0.2]), 8)
  for weights in params["layers"]:
    weights["query"] *= sharpness[None, None]
  rng = np.random.default_rng(0)
  rows = [rng.integers(0, 64, n).tolist() for n in (500, 350)]
  plans = [
    kvjax.get_plan(name, kvjax.Tokens(64))
    for name in (
      "ada/snapkv:window=8",
      "compactor.vllm:chunk=64:leverage_chunk=100:first=4:last=8",
    )
  ]
  return params, kvjax.sweep(MODEL, params, kvjax.Prompts.of(rows), plans)[0]


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1], ids=["adakv", "compactor.vllm"])
def test_a_models_bytes_follow_what_its_heads_hold(prefilled, index):
  cache = prefilled[1][index]
  valid = np.asarray(cache.lengths)
  assert valid.shape == (2, 2, HEADS)
  assert np.all(valid.sum(axis=-1) == HEADS * 64)
  # So many pages hold 256 tokens of 4 heads, whichever have them: here all but
  # a few are in use.
  pages = (HEADS * 64 + HEADS * (DEFAULT_PAGE - 1)) // DEFAULT_PAGE
  used = (-(-valid // DEFAULT_PAGE)).sum(axis=-1)
  assert np.all((pages - 2 <= used) & (used <= pages))
  slot = 2 * 8 * 4 + 4
  layer = 2 * pages * (DEFAULT_PAGE * slot + 4) + 4  # head numbers, cursor
  assert cache.nbytes == 2 * layer + 2 * 4
  padded = sum(2 * HEADS * most * slot for most in valid.max(axis=(1, 2)))
  assert cache.nbytes < 0.75 * padded


@pytest.mark.slow
def test_a_conversation_uses_the_buffers_of_pages(prefilled):
  params, (cache, _) = prefilled
  cache = kvjax.reserve(cache, 40)
  given = [leaf for leaf in jax.tree.leaves(cache.stacks) if leaf.ndim > 2]
  places = {leaf.unsafe_buffer_pointer() for leaf in given}
  question = kvjax.Prompts.of([[1, 2], [3]])
  decoding = kvjax.Decoding(4)
  cache = kvjax.generate(
    MODEL, params, cache, question, decoding, keep=True
  ).cache
  assert all(leaf.is_deleted() for leaf in given)
  got = [leaf for leaf in jax.tree.leaves(cache.stacks) if leaf.ndim > 2]
  assert {leaf.unsafe_buffer_pointer() for leaf in got} == places
  assert len(places) == len(got) == len(given)
