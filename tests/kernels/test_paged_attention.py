"""Attention over pages, and over parts, against float64 loops."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kvjax import kernels
from kvjax.cache.sharding import parse_mesh
from kvjax.kernels.attention import Partial, attention, merge, partial_attention
from kvjax.kernels.paged_attention import Span, paged_attention, xla
from kvjax.kernels.paged_attention.reference import paged_attention_reference
from kvjax.kernels.quantized import Quantized, dequantize, quantize

PAGE = 8
T = 40


def block(seed, K, G, S, D=16, dtype="float32", T=T):
  """Two rows of T tokens, S queries at their end, and what heads keep.

  The first query head of the first row finds all keys alike.
  """
  rng = np.random.default_rng(seed)
  q, k, v = (
    rng.normal(size=(2, heads, length, D)).astype(dtype)
    for heads, length in ((K * G, S), (K, T), (K, T))
  )
  q[0, 0] = 0
  places = np.broadcast_to(np.arange(T - S, T, dtype=np.int32), (2, S))
  share = np.linspace(1.0, 0.0, K + 1)[:-1]
  kept = rng.random((2, K, T)) < share[None, :, None]
  kept[1] = np.roll(kept[1], 1, axis=0)  # rows differ in what heads hold
  kept[1, -1] = False
  return *map(jnp.asarray, (q, k, v, places)), kept


def paged(k, v, kept, unused=None, PAGE=PAGE):
  """Pages in random order; NaN wherever there is no token.

  There are `unused` ones after them; by default they come to a number that
  follows from the shapes alone.
  """
  rng = np.random.default_rng(0)
  k, v = np.asarray(k), np.asarray(v)
  rows = []
  for b in range(len(kept)):
    pages = []
    for j in range(kept.shape[1]):
      slots = np.flatnonzero(kept[b, j])
      pages += [(j, slots[i : i + PAGE]) for i in range(0, len(slots), PAGE)]
    rows.append([pages[i] for i in rng.permutation(len(pages))])
  R = max(map(len, rows)) + (unused or 0)
  if unused is None:
    R = 2 + k.shape[1] * -(-k.shape[2] // PAGE)
  shape = (len(kept), R, PAGE)
  positions, heads = np.full(shape, -1, np.int32), np.full(shape[:2], -1)
  pk, pv = (np.full((*shape, x.shape[-1]), np.nan, x.dtype) for x in (k, v))
  for b, pages in enumerate(rows):
    for r, (j, slots) in enumerate(pages):
      heads[b, r] = j
      positions[b, r, : len(slots)] = slots
      pk[b, r, : len(slots)], pv[b, r, : len(slots)] = (
        k[b, j][slots],
        v[b, j][slots],
      )
  positions[heads < 0] = 3  # an unused page drops out whatever it holds
  heads = heads.astype(np.int32)
  return tuple(map(jnp.asarray, (pk, pv, positions, heads)))


def by_hand(q, k, v, places, kept):
  """Every query by itself, in float64."""
  q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
  B, N, S, D = q.shape
  output, lse = np.zeros(q.shape), np.full((B, N, S), -np.inf)
  for b, n, s in np.ndindex(B, N, S):
    j = n * k.shape[1] // N
    slots = np.flatnonzero(kept[b, j])
    slots = slots[slots <= int(places[b, s])]
    if len(slots):
      logits = k[b, j, slots] @ q[b, n, s] / D**0.5
      most = logits.max()
      lse[b, n, s] = most + np.log(np.sum(np.exp(logits - most)))
      output[b, n, s] = np.exp(logits - lse[b, n, s]) @ v[b, j, slots]
  return output, lse


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


@contextlib.contextmanager
def on(platform):
  """Pallas kernels, interpreted."""
  interpret = {
    "tpu": (pltpu.force_tpu_interpret_mode, pltpu.InterpretParams),
    "gpu": (plgpu.force_gpu_interpret_mode, plgpu.InterpretGPUParams),
  }
  force, make = interpret[platform]
  with force(make(detect_races=True)), kernels.use("pallas", platform):
    yield


@jax.jit
def eighths(k, v, pages):
  """Pages in eight bits, what they stand for, and NaN scales where NaN was."""
  pk, pv, positions, heads = pages

  def of(x):
    small = quantize(jnp.nan_to_num(x), "int8")
    lost = jnp.isnan(x).any(axis=-1, keepdims=True)
    return Quantized(small.qvalue, jnp.where(lost, jnp.nan, small.scale))

  k, v = (dequantize(quantize(x, "int8"), jnp.float32) for x in (k, v))
  return k, v, (of(pk), of(pv), positions, heads)


def close(found, expected, tolerance):
  output, lse = expected
  found_output = np.asarray(found.output, np.float64)
  largest = np.abs(output).max()
  np.testing.assert_allclose(found_output, output, atol=tolerance * largest)
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)
  assert np.any(np.isneginf(lse))


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


def in_pool(pages, starts, part):
  """Pages in turns among the parts of a row, from a page on in each.

  Those before and after them are of no head, and have tokens to attend to.
  """
  parts = len(starts[0])

  def put(x, fill):
    x = np.asarray(x)
    pool = np.full((2, parts, part, *x.shape[2:]), fill, x.dtype)
    for b, n in np.ndindex(2, parts):
      mine = x[b, n::parts]
      pool[b, n, starts[b][n] : starts[b][n] + len(mine)] = mine
    return jnp.asarray(pool.reshape(2, parts * part, *x.shape[2:]))

  return jax.tree.map(
    put, pages, (*jax.tree.map(lambda _: 3, pages[:2]), 0, -1)
  )


# Pages at the beginning and the end of a pool, and in the middle of a block.
ENDS = ((0,), (17,)), ((6,), (3,))


@pytest.mark.parametrize("starts", ENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_a_layer_is_read_where_it_is_in_a_pool(chosen, platform, dtype, starts):
  chosen({"paged_attention/tpu": {"block": 128}})
  q, k, v, places, kept = block(13, 2, 3, 1, D=128, dtype="bfloat16", T=150)
  pages = paged(k, v, kept, unused=0, PAGE=32)
  most = pages[3].shape[1]
  part = 17 + most
  if dtype == "int8":
    k, v, pages = eighths(k, v, pages)
  keys, values, positions, heads = in_pool(pages, starts, part)
  run = jax.jit(
    functools.partial(paged_attention, kv_heads=2, span=Span(part, most))
  )
  with contextlib.nullcontext() if platform == "cpu" else on(platform):
    found = run(q, keys, values, places, positions, heads)
  close(found, by_hand(q, k, v, places, kept), 2e-2)


# The parts of two devices, and how many of the pages a device has here.
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("S", [1, 5])
def test_a_device_may_have_parts_of_several(S, cut):
  """All of both, or a mesh of other devices has cut through them."""
  q, k, v, places, kept = block(14, 3, 2, S)
  pages = paged(k, v, kept, unused=1)
  most, part = -(-pages[3].shape[1] // 2), 30
  starts = ((4, 30 - most), (9, 0))
  keys, values, positions, heads = in_pool(pages, starts, part)
  run = jax.jit(
    functools.partial(paged_attention, kv_heads=3, span=Span(part, most))
  )
  share = 2 * part // cut
  found = [
    run(
      q, keys[:, own], values[:, own], places, positions[:, own], heads[:, own]
    )
    for own in (slice(n * share, (n + 1) * share) for n in range(cut))
  ]
  whole = functools.reduce(jax.jit(merge), found)
  close(whole, by_hand(q, k, v, places, kept), 1e-5)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_kernels_read_one_place_of_a_row(platform):
  q, k, v, places, kept = block(10, 2, 2, 1, D=128, dtype="bfloat16")
  pages = paged(k, v, kept, unused=0, PAGE=32)
  part = pages[3].shape[1]
  keys, values, *rest = in_pool(pages, ((0, 0), (0, 0)), part)
  span = Span(part, part - 1)
  run = functools.partial(paged_attention, kv_heads=2, span=span)
  with on(platform), pytest.raises(NotImplementedError, match="several places"):
    jax.eval_shape(run, q, keys, values, places, *rest)


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
