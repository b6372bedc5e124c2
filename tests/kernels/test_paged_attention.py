"""Attention over pages, and over parts, against float64 loops."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

import kernels
from kernels.attention import (
  Partial,
  attention,
  merge,
  partial_attention,
  warpgroup,
)
from kernels.paged_attention import paged_attention, tpu, xla
from kernels.paged_attention.reference import paged_attention_reference
from kernels.paged_attention.xla import paged_attention_xla
from kernels.quantised import Quantised, dequantise, quantise

PAGE = 8
T = 40


def block(seed, K, G, S, D=16, dtype="float32", T=T):
  """Two rows of T tokens, S queries at their end, and what heads keep."""
  keys = jax.random.split(jax.random.key(seed), 3)
  q = jax.random.normal(keys[0], (2, K * G, S, D)).astype(dtype)
  k = jax.random.normal(keys[1], (2, K, T, D)).astype(dtype)
  v = jax.random.normal(keys[2], (2, K, T, D)).astype(dtype)
  places = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32) + T - S, (2, S))
  share = np.linspace(1.0, 0.0, K + 1)[:-1]
  rng = np.random.default_rng(seed)
  kept = rng.random((2, K, T)) < share[None, :, None]
  kept[1] = np.roll(kept[1], 1, axis=0)  # rows differ in what heads hold
  kept[1, -1] = False
  return q, k, v, places, kept


def paged(k, v, kept, unused=2, PAGE=PAGE):
  """Pages in random order; NaN wherever there is no token."""
  rng = np.random.default_rng(0)
  k, v = np.asarray(k), np.asarray(v)
  rows = []
  for b in range(len(kept)):
    pages = []
    for j in range(kept.shape[1]):
      slots = np.flatnonzero(kept[b, j])
      pages += [(j, slots[i : i + PAGE]) for i in range(0, len(slots), PAGE)]
    rows.append([pages[i] for i in rng.permutation(len(pages))])
  R = max(map(len, rows)) + unused
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
      lse[b, n, s] = np.log(np.sum(np.exp(logits)))
      output[b, n, s] = np.exp(logits - lse[b, n, s]) @ v[b, j, slots]
  return output, lse


@pytest.mark.parametrize(
  "program", [paged_attention_xla, paged_attention_reference]
)
@pytest.mark.parametrize("S", [1, 5])
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("K", [1, 2, 3])
def test_equals_a_loop(K, G, S, program):
  q, k, v, places, kept = block(0, K, G, S)
  pk, pv, positions, heads = paged(k, v, kept)
  run = jax.jit(program, static_argnums=6)
  found = run(q, pk, pv, places, positions, heads, K)
  output, lse = by_hand(q, k, v, places, kept)
  np.testing.assert_allclose(found.output, output, rtol=0, atol=1e-5)
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)
  assert np.any(np.isneginf(lse))  # the head without tokens
  assert not np.any(found.output[np.isneginf(lse)])


@pytest.mark.parametrize("S", [1, 5])
def test_bfloat16_stays_close_to_float64(S):
  q, k, v, places, kept = block(1, 3, 2, S, dtype="bfloat16")
  pk, pv, positions, heads = paged(k, v, kept)
  found = paged_attention(q, pk, pv, places, positions, heads, 3)
  output, lse = by_hand(q, k, v, places, kept)
  assert found.output.dtype == jnp.bfloat16
  assert found.lse.dtype == jnp.float32
  np.testing.assert_allclose(
    found.output.astype("float32"), output, rtol=2e-2, atol=2e-2
  )
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=2e-2)


@pytest.mark.parametrize("G", [1, 16])
def test_long_blocks_go_by_chunks_of_queries(G):
  # G = 16 is more queries than a page has slots: one position at a time.
  q, k, v, places, kept = block(2, 2, G, 19)
  pk, pv, positions, heads = paged(k, v, kept)
  places = places.at[0, 3].set(-1)
  found = paged_attention(q, pk, pv, places, positions, heads, 2)
  output, lse = by_hand(q, k, v, places, kept)
  np.testing.assert_allclose(found.output, output, rtol=0, atol=1e-5)
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)


def test_logits_of_any_size_stay_finite():
  q, k, v, places, kept = block(3, 2, 2, 5)
  pk, pv, positions, heads = paged(k * 300, v, kept)
  found = paged_attention(q, pk, pv, places, positions, heads, 2)
  dense = jnp.where(kept, jnp.arange(T, dtype=jnp.int32), -1)
  expected = attention(q, k * 300, v, places, dense, "reference")
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
  assert flops(4, 32) < 1.5 * group * slots * 64 * 4
  assert flops(4, 64) < 2.1 * flops(4, 32)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("S", [1, 5, 300])
def test_log_sum_exp_of_a_plain_cache(S, implementation):
  q, k, v, _, kept = block(4, 2, 2, S)
  places = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32) % T, (2, S))
  dense = jnp.where(kept, jnp.arange(T, dtype=jnp.int32), -1)
  found = partial_attention(q, k, v, places, dense, implementation)
  output, lse = by_hand(q, k, v, places, kept)
  np.testing.assert_allclose(found.output, output, rtol=0, atol=1e-5)
  np.testing.assert_allclose(found.lse, lse, rtol=0, atol=1e-5)
  same = attention(q, k, v, places, dense, implementation)
  np.testing.assert_array_equal(found.output, same)


@pytest.mark.parametrize("cut", [0, 1, 17, T])
def test_parts_merge_into_the_whole(cut):
  q, k, v, places, kept = block(5, 2, 2, 5)
  first = kept & (np.arange(T) < cut)

  def part(kept):
    dense = jnp.where(kept, jnp.arange(T, dtype=jnp.int32), -1)
    return partial_attention(q, k * 30, v, places, dense)

  found = merge(part(first), part(kept & ~first))
  output, lse = by_hand(q, k * 30, v, places, kept)
  np.testing.assert_allclose(found.output, output, rtol=0, atol=2e-5)
  np.testing.assert_allclose(found.lse, lse, rtol=1e-6, atol=1e-5)


def test_nothing_merged_with_nothing_is_nothing():
  none = Partial(jnp.zeros((1, 1, 2, 3)), jnp.full((1, 1, 2), -jnp.inf))
  found = merge(none, none)
  assert not np.any(found.output)
  assert np.all(np.isneginf(found.lse))


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


def eighths(k, v, pages):
  """Pages in eight bits, what they stand for, and NaN scales where NaN was."""
  pk, pv, positions, heads = pages

  def of(x):
    small = quantise(jnp.nan_to_num(x), "int8")
    lost = jnp.isnan(x).any(axis=-1, keepdims=True)
    return Quantised(small.qvalue, jnp.where(lost, jnp.nan, small.scale))

  k, v = (dequantise(quantise(x, "int8"), jnp.float32) for x in (k, v))
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
  monkeypatch.setattr(xla, "WHOLE", 3 * PAGE)
  q, k, v, places, kept = block(6, 3, 2, S)
  k, v, pages = eighths(k, v, paged(k, v, kept))
  assert pages[0].shape[1] % 3  # the last few were partly there before
  found = paged_attention(q, *pages[:2], places, *pages[2:], 3)
  close(found, by_hand(q, k, v, places, kept), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tpu_kernel(monkeypatch, dtype):
  monkeypatch.setattr(tpu, "BLOCK", 128)
  narrow = "bfloat16" if dtype == "bfloat16" else "float32"
  q, k, v, places, kept = block(7, 3, 2, 1, D=128, dtype=narrow, T=200)
  kept[0, 0] = True
  # A query in the middle of its row; unused pages fill a block and a half.
  places = places.at[1].set(120)
  pages = paged(k, v, kept, unused=6, PAGE=32)
  if dtype == "int8":
    k, v, pages = eighths(k, v, pages)
  with on("tpu"):
    run = jax.jit(paged_attention, static_argnums=6)
    found = run(q, *pages[:2], places, *pages[2:], 3)
  expected = by_hand(q, k, v, places, kept)
  close(found, expected, 2e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
  ("dtype", "D", "blocks"), [("bfloat16", 64, 2), ("int8", 128, 8)]
)
def test_gpu_kernel(monkeypatch, dtype, D, blocks):
  monkeypatch.setattr(warpgroup, "WARPGROUPS", blocks)
  q, k, v, places, kept = block(8, 2, 3, 1, D=D, dtype="bfloat16", T=150)
  pages = paged(k, v, kept, unused=3, PAGE=32)
  assert pages[3].shape[1] % 2  # half a chunk remains
  if dtype == "int8":
    k, v, pages = eighths(k, v, pages)
  with on("gpu"):
    run = jax.jit(paged_attention, static_argnums=6)
    found = run(q, *pages[:2], places, *pages[2:], 2)
  close(found, by_hand(q, k, v, places, kept), 2e-2)


def test_every_device_of_a_mesh_reads_its_rows():
  q, k, v, places, kept = block(9, 2, 2, 1, D=128)
  pages = paged(k, v, kept, PAGE=32)
  axes = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)
  with on("tpu"), jax.set_mesh(mesh):
    run = jax.jit(paged_attention, static_argnums=6)
    found = run(q, *pages[:2], places, *pages[2:], 2)
  close(found, by_hand(q, k, v, places, kept), 1e-5)


def test_kernels_decline():
  q, k, v, places, kept = block(10, 2, 2, 2, D=128)
  pages = paged(k, v, kept, PAGE=32)
  narrow = paged(k[..., :16], v[..., :16], kept, PAGE=32)
  one, last = q[:, :, -1:, :16], places[:, -1:]
  for platform in ("tpu", "gpu"):
    with on(platform), pytest.raises(NotImplementedError):
      paged_attention(q, *pages[:2], places, *pages[2:], 2)
    with on(platform), pytest.raises(NotImplementedError):
      paged_attention(one, *narrow[:2], last, *narrow[2:], 2)
    with kernels.use(platform=platform):
      found = paged_attention(q, *pages[:2], places, *pages[2:], 2)
    close(found, by_hand(q, k, v, places, kept), 1e-5)
