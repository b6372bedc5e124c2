"""Attention over pages, and over parts, against float64 loops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from page_rows import PAGE, T, block, by_hand, close, eighths, on, paged

from kvjax import kernels
from kvjax.cache.sharding import parse_mesh
from kvjax.kernels.attention import Partial, attention, merge, partial_attention
from kvjax.kernels.paged_attention import paged_attention, xla
from kvjax.kernels.paged_attention.reference import paged_attention_reference

XLA = jax.jit(paged_attention, static_argnums=6)
REFERENCE = jax.jit(paged_attention_reference, static_argnums=6)


@pytest.mark.parametrize(
  ("program", "K", "G", "S"),
  # Queries go by chunks where S is more than 8 / G.
  [
    (XLA, 1, 1, 1),
    (XLA, 1, 4, 5),
    (XLA, 2, 2, 5),
    (XLA, 2, 4, 1),
    (XLA, 3, 1, 5),
    (XLA, 3, 2, 1),
    (REFERENCE, 1, 4, 5),
    (REFERENCE, 3, 2, 1),
  ],
)
def test_equals_a_loop(program, K, G, S):
  q, k, v, places, kept = block(0, K, G, S)
  pk, pv, positions, heads = paged(k, v, kept)
  found = program(q, pk, pv, places, positions, heads, K)
  output, lse = by_hand(q, k, v, places, kept)
  np.testing.assert_allclose(found.output, output, rtol=0, atol=1e-5)
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)
  assert np.any(np.isneginf(lse))  # the head without tokens
  assert not np.any(np.asarray(found.output)[np.isneginf(lse)])


@pytest.mark.parametrize("S", [1, 5])
def test_bfloat16_stays_close_to_float64(S):
  q, k, v, places, kept = block(1, 3, 2, S, dtype="bfloat16")
  pk, pv, positions, heads = paged(k, v, kept)
  found = XLA(q, pk, pv, places, positions, heads, 3)
  output, lse = by_hand(q, k, v, places, kept)
  assert found.output.dtype == jnp.bfloat16
  assert found.lse.dtype == jnp.float32
  np.testing.assert_allclose(
    np.float32(found.output), output, rtol=2e-2, atol=2e-2
  )
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=2e-2)


@pytest.mark.parametrize("G", [1, 16])
def test_long_blocks_go_by_chunks_of_queries(G):
  # G = 16 is more queries than a page has slots: one position at a time.
  q, k, v, places, kept = block(2, 2, G, 19)
  pk, pv, positions, heads = paged(k, v, kept)
  places = np.array(places)
  places[0, 3] = -1
  found = XLA(q, pk, pv, jnp.asarray(places), positions, heads, 2)
  output, lse = by_hand(q, k, v, places, kept)
  np.testing.assert_allclose(found.output, output, rtol=0, atol=1e-5)
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)


def test_logits_of_any_size_stay_finite():
  q, k, v, places, kept = block(3, 2, 2, 5)
  # Few bits, so that no rounding decides which is the largest.
  q, k = (jnp.asarray(np.round(np.asarray(x) * 8) / 8) for x in (q, k))
  k = jnp.asarray(np.asarray(k) * 300)
  pk, pv, positions, heads = paged(k, v, kept)
  found = XLA(q, pk, pv, places, positions, heads, 2)
  expected, _ = by_hand(q, k, v, places, kept)
  np.testing.assert_allclose(found.output, expected, rtol=0, atol=1e-4)


def test_work_follows_the_pages_not_the_fullest_head():
  def flops(kv_heads, pages):
    shapes = [
      ((1, 8, 1, 64), "float32"),
      ((1, pages, 64, 64), "float32"),
      ((1, pages, 64, 64), "float32"),
      ((1, 1), "int32"),
      ((1, pages, 64), "int32"),
      ((1, pages), "int32"),
    ]
    args = [jax.ShapeDtypeStruct(*x) for x in shapes]
    run = jax.jit(paged_attention, static_argnums=6)
    compiled = run.lower(*args, kv_heads).compile()
    return compiled.cost_analysis()["flops"]

  # One head may hold all 32 pages; two products of 64 per query and slot.
  slots, group = 32 * 64, 2
  few = flops(4, 32)
  assert few < 1.5 * group * slots * 64 * 4
  assert flops(4, 64) < 2.1 * few


def dense(kept):
  """The positions of a cache that holds some of T slots."""
  return jnp.asarray(np.where(kept, np.arange(T, dtype=np.int32), -1))


@pytest.mark.parametrize(
  ("implementation", "S"),
  [("chunked", 1), ("chunked", 5), ("chunked", 300), ("reference", 5)],
)
def test_log_sum_exp_of_a_plain_cache(implementation, S):
  q, k, v, _, kept = block(4, 2, 2, S)
  places = np.broadcast_to(np.arange(S, dtype=np.int32) % T, (2, S))
  given = q, k, v, jnp.asarray(places), dense(kept)
  part, whole = (
    jax.jit(run, static_argnums=5) for run in (partial_attention, attention)
  )
  found = part(*given, implementation)
  output, lse = by_hand(q, k, v, places, kept)
  np.testing.assert_allclose(found.output, output, rtol=0, atol=1e-5)
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)
  same = whole(*given, implementation)
  np.testing.assert_array_equal(found.output, same)


@jax.jit
def merged(first, second, *given):
  q, k, v, places = given
  return merge(
    partial_attention(q, k, v, places, first),
    partial_attention(q, k, v, places, second),
  )


@pytest.mark.parametrize("cut", [0, 1, 17, T])
def test_parts_merge_into_the_whole(cut):
  q, k, v, places, kept = block(5, 2, 2, 5)
  k = jnp.asarray(np.asarray(k) * 30)
  first = kept & (np.arange(T) < cut)
  found = merged(dense(first), dense(kept & ~first), q, k, v, places)
  output, lse = by_hand(q, k, v, places, kept)
  np.testing.assert_allclose(found.output, output, rtol=0, atol=2e-5)
  np.testing.assert_allclose(found.lse, lse, rtol=1e-6, atol=1e-5)


def test_nothing_merged_with_nothing_is_nothing():
  none = Partial(jnp.zeros((1, 1, 2, 3)), jnp.full((1, 1, 2), -jnp.inf))
  found = jax.jit(merge)(none, none)
  assert not np.any(found.output)
  assert np.all(np.isneginf(found.lse))


def in_stack(tree):
  """The second of three layers; the others hold other numbers."""
  return jax.tree.map(
    lambda x: jnp.stack([jnp.roll(x, 1, -2), x, jnp.roll(x, 2, -2)]), tree
  )


def read_layer(queries, keys, values, *rest):
  """The attention to a layer that stands in a stack."""
  keys, values = in_stack((keys, values))
  return paged_attention(queries, keys, values, *rest, layer=jnp.int32(1))


@pytest.mark.parametrize("S", [1, 5])
def test_pages_of_eight_bits_are_made_whole_a_few_at_a_time(monkeypatch, S):
  monkeypatch.setattr(xla, "MAX_DEQUANTIZED", 3 * PAGE)
  q, k, v, places, kept = block(11, 3, 2, S)
  k, v, pages = eighths(k, v, paged(k, v, kept, unused=2))
  # The last three were partly there before, a page that is used among them.
  assert pages[0].shape[1] % 3
  run = jax.jit(functools.partial(paged_attention, kv_heads=3))
  found = run(q, *pages[:2], places, *pages[2:])
  close(found, by_hand(q, k, v, places, kept), 1e-5)


@pytest.mark.parametrize(
  ("dtype", "D"), [("float32", 64), ("bfloat16", 128), ("int8", 128)]
)
def test_tpu_kernel(chosen, dtype, D):
  chosen({"paged_attention/tpu": {"block": 128}})
  narrow = "bfloat16" if dtype == "bfloat16" else "float32"
  q, k, v, places, kept = block(7, 3, 2, 1, D=D, dtype=narrow, T=200)
  kept[0, 0] = True
  # A query in the middle of its row; unused pages fill a block and a half.
  places = jnp.asarray(np.int32([[199], [120]]))
  pages = paged(k, v, kept, unused=6, PAGE=32)
  if dtype == "int8":
    k, v, pages = eighths(k, v, pages)
  with on("tpu"):
    run = jax.jit(read_layer, static_argnums=6)
    found = run(q, *pages[:2], places, *pages[2:], 3)
  expected = by_hand(q, k, v, places, kept)
  close(found, expected, 2e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
  ("dtype", "D", "blocks"), [("bfloat16", 64, 2), ("int8", 128, 8)]
)
def test_gpu_kernel(chosen, dtype, D, blocks):
  chosen({"paged_attention/gpu": {"blocks": blocks}})
  q, k, v, places, kept = block(8, 2, 3, 1, D=D, dtype="bfloat16", T=150)
  pages = paged(k, v, kept, unused=3, PAGE=32)
  assert pages[3].shape[1] % 2  # half a chunk remains
  if dtype == "int8":
    k, v, pages = eighths(k, v, pages)
  with on("gpu"):
    run = jax.jit(read_layer, static_argnums=6)
    found = run(q, *pages[:2], places, *pages[2:], 2)
  close(found, by_hand(q, k, v, places, kept), 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("platform", "dtype"),
  [("tpu", "float32"), ("tpu", "bfloat16"), ("gpu", "bfloat16")],
)
def test_kernels_at_heads_of_every_size(chosen, platform, dtype, head_sizes):
  """Of two rows the second holds nothing."""
  chosen({"paged_attention/tpu": {"block": 128}})
  D, G = head_sizes
  q, k, v, places, kept = block(12, 2, G, 1, D=D, dtype=dtype, T=151)
  kept[1] = False
  pages = paged(k, v, kept, unused=3, PAGE=32)
  given = q, *pages[:2], places, *pages[2:]
  run = jax.jit(functools.partial(paged_attention, kv_heads=2))
  if platform == "gpu" and D == 256:
    with on("gpu"), pytest.raises(NotImplementedError, match="256 bfloat16"):
      run(*given)
    return
  with on(platform):
    found = run(*given)
  expected = by_hand(q, k, v, places, kept)
  close(found, expected, 2e-2 if dtype == "bfloat16" else 1e-5)


def test_every_device_of_a_mesh_reads_its_rows():
  q, k, v, places, kept = block(9, 2, 2, 1, D=128)
  pages = paged(k, v, kept, PAGE=32)
  axes = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)
  with on("tpu"), jax.set_mesh(mesh):
    run = jax.jit(read_layer, static_argnums=6)
    found = run(q, *pages[:2], places, *pages[2:], 2)
  close(found, by_hand(q, k, v, places, kept), 1e-5)


@pytest.mark.parametrize("S", [1, 3])
def test_every_device_of_a_mesh_reads_its_pages(S):
  q, k, v, places, kept = block(9, 2, 2, S)
  pages = paged(k, v, kept, PAGE=4)
  keys, values, positions, heads = pages
  missing = -keys.shape[1] % 4
  keys, values, positions, heads = (
    jnp.pad(
      x,
      ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)),
      # Of no head, and never to be read.
      constant_values=jnp.nan if x.dtype == jnp.float32 else -1,
    )
    for x in (keys, values, positions, heads)
  )
  mesh = parse_mesh("model:4")
  place = jax.NamedSharding(mesh, jax.P(None, "model"))
  given = (q, keys, values, places, positions, heads)
  shapes = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    if x.shape[1] == heads.shape[1] and x.ndim > 1 and x is not q
    else x
    for x in given
  ]
  with jax.set_mesh(mesh):
    run = jax.jit(functools.partial(paged_attention, kv_heads=2))
    text = run.lower(*shapes).compile().as_text()
    found = run(*given)
  close(found, by_hand(q, k, v, places, kept), 1e-5)
  # Outputs, their weights and maxima are summed up; no page moves.
  assert "all-reduce" in text
  assert not re.search("all-gather|all-to-all|collective-permute", text)


def test_gpus_read_whole_tiles_of_slots():
  q, k, v, places, kept = block(10, 2, 2, 1, D=128)
  run = functools.partial(paged_attention, kv_heads=2)
  q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
  pages = paged(k, v, kept, PAGE=3)
  given = q, *pages[:2], places, *pages[2:]
  assert pages[2][0].size % 8
  with on("gpu"), pytest.raises(NotImplementedError, match="multiple of 8"):
    jax.eval_shape(run, *given)


def test_kernels_decline():
  """Several queries; vectors that are too short, or pages."""
  for S, D, P in ((2, 128, 32), (1, 16, 16)):
    q, k, v, places, kept = block(10, 2, 2, S, D=D)
    pages = paged(k, v, kept, PAGE=P)
    given = q, *pages[:2], places, *pages[2:]
    for platform in ("tpu", "gpu"):
      run = functools.partial(paged_attention, kv_heads=2)
      with on(platform), pytest.raises(NotImplementedError):
        jax.eval_shape(run, *given)
      with kernels.use(platform=platform):
        assert jax.eval_shape(run, *given).output.shape == q.shape
