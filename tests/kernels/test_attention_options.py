"""Windows, scales, caps, sinks and wide values, against loops in float64."""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask_info as mask_info,
)
from jax.sharding import AxisType

from kvjax import kernels
from kvjax.kernels.attention import (
  AttentionOptions,
  Partial,
  attention,
  chunked,
  merge,
  partial_attention,
  with_sinks,
)
from kvjax.kernels.attention_mass import causal_mass
from kvjax.kernels.attention_mass import xla as mass_xla
from kvjax.kernels.attention_mass.reference import causal_mass_reference
from kvjax.kernels.paged_attention import paged_attention
from kvjax.kernels.paged_attention import xla as paged_xla
from kvjax.kernels.paged_attention.reference import paged_attention_reference
from kvjax.kernels.prompt_attention import prompt_attention, tpu
from kvjax.kernels.quantized import quantize
from kvjax.kernels.sparse_decode import sparse_decode
from kvjax.kernels.sparse_decode.reference import sparse_decode_reference

# T is 61 at most, and logits without a scale are about 1.
OPTIONS = {
  "plain": AttentionOptions(),
  "a window of 1": AttentionOptions(window=1),
  "a window of 5": AttentionOptions(window=5),
  "a window of all": AttentionOptions(window=1000),
  "a scale": AttentionOptions(scale=0.7),
  "a cap": AttentionOptions(softcap=0.8),
  "everything": AttentionOptions(window=17, scale=0.6, softcap=1.5),
}
SOME = ["a window of 5", "a cap", "everything"]
EVERYTHING = OPTIONS["everything"]

# B, N, K, S, T, D and the width of values.
SHAPES = {
  "one query": (2, 4, 2, 1, 37, 8, 12),
  "a few": (2, 3, 3, 7, 29, 8, 8),
  "query chunks": (2, 6, 2, 45, 61, 16, 5),
}


def layer(B, N, K, S, T, D, W, dtype="float32", seed=0):
  """Queries of rows of unequal lengths; NaN in empty slots, out of order.

  Where there are several queries, the last two of the second row are padding.
  """
  rng = np.random.default_rng(seed + S)
  places = rng.permuted(np.tile(np.arange(T), (B, K, 1)), axis=-1)
  query_positions = np.tile(np.arange(T - S, T), (B, 1))
  for row in range(1, B):
    end = T - 3 * row
    places[row][places[row] >= end] = -1
    query_positions[row] = np.arange(end - S, end)
    if S > 1:
      query_positions[row] = np.append(query_positions[row][2:], [-1, -1])
  places[rng.random(places.shape) < 0.25] = -1
  queries, keys, values = (
    rng.normal(size=(B, heads, length, width))
    for heads, length, width in ((N, S, D), (K, T, D), (K, T, W))
  )
  keys[places < 0] = values[places < 0] = np.nan
  queries, keys, values = (x.astype(dtype) for x in (queries, keys, values))
  arrays = queries, keys, values, np.int32(query_positions), np.int32(places)
  return tuple(map(jnp.asarray, arrays))


def sinks_of(N):
  """Logits from far below to above the others."""
  return jnp.asarray(np.linspace(-3, 2.5, N), jnp.float32)


def weights_of(queries, keys, query_positions, places, options, sinks=None):
  """What every query gives to every slot, and its log-sum-exp without sinks."""
  queries, keys = (np.asarray(x).astype(np.float64) for x in (queries, keys))
  query_positions, places = np.asarray(query_positions), np.asarray(places)
  B, N, S, D = queries.shape
  K, T = keys.shape[1:3]
  weights, lse = np.zeros((B, N, S, T)), np.full((B, N, S), -np.inf)
  for b, n, s, t in np.ndindex(B, N, S, T):
    key, place = keys[b, n // (N // K), t], places[b, n // (N // K), t]
    if place < 0 or place > query_positions[b, s]:
      continue
    if (
      options.window is not None
      and not query_positions[b, s] - place < options.window
    ):
      continue
    logit = np.sum(queries[b, n, s] * key)
    logit = (
      logit / math.sqrt(D) if options.scale is None else (logit * options.scale)
    )
    if options.softcap is not None:
      logit = options.softcap * math.tanh(logit / options.softcap)
    weights[b, n, s, t] = math.exp(logit)
  total = weights.sum(axis=-1)
  lse[total > 0] = np.log(total[total > 0])
  if sinks is not None:
    total = total + np.exp(np.asarray(sinks, np.float64))[:, None]
  return weights / np.where(total > 0, total, 1)[..., None], lse


def weighted(weights, values):
  """What every query gets: nothing, even of NaN, where its weight is 0."""
  values = np.nan_to_num(np.asarray(values).astype(np.float64))
  group = weights.shape[1] // values.shape[1]
  return np.einsum("bnst,bntd->bnsd", weights, values.repeat(group, axis=1))


def by_hand(
  queries, keys, values, query_positions, places, options, sinks=None
):
  weights, lse = weights_of(
    queries, keys, query_positions, places, options, sinks
  )
  return weighted(weights, values), lse


def most_of(values):
  """The largest magnitude: 2^-9 of it is what rounding to bfloat16 costs."""
  return float(np.nanmax(np.abs(np.asarray(values).astype(np.float64))))


def assert_close(actual, expected, tolerance=1e-5):
  np.testing.assert_allclose(
    np.asarray(actual).astype(np.float64), expected, rtol=0, atol=tolerance
  )


def assert_partial(actual, expected, tolerance=1e-5):
  assert actual.lse.dtype == jnp.float32
  assert_close(actual.output, expected[0], tolerance)
  assert_close(actual.lse, expected[1], 1e-5)


@contextlib.contextmanager
def on_tpu():
  """The kernels of TPUs, interpreted, with an eye on races."""
  params = pltpu.InterpretParams(detect_races=True)
  with pltpu.force_tpu_interpret_mode(params), kernels.use("pallas", "tpu"):
    yield


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("window", 0),
    ("window", -3),
    ("scale", 0.0),
    ("scale", -1.0),
    ("scale", math.nan),
    ("softcap", 0.0),
    ("softcap", math.inf),
  ],
)
def test_options_without_meaning_are_refused(name, value):
  with pytest.raises(ValueError, match=f"^{name} must be [^.]*, not .*\\.$"):
    AttentionOptions(**{name: value})


def test_equal_options_share_compiled_programs():
  compiled = jax.jit(attention, static_argnames="options")
  operands = layer(*SHAPES["a few"])
  first = compiled(*operands, options=AttentionOptions(window=4))
  again = compiled(*operands, options=AttentionOptions(window=4))
  np.testing.assert_array_equal(first, again)
  assert compiled._cache_size() == 1


def whole_and_parts(options, implementation):
  """Attention with sinks, without, and of two halves of the slots, merged."""

  def run(queries, keys, values, query_positions, places, sinks):
    def of(part):
      return partial_attention(
        queries,
        *(x[:, :, part] for x in (keys, values)),
        query_positions,
        places[:, :, part],
        implementation,
        options,
      )

    half = keys.shape[2] // 2
    merged = merge(of(slice(half)), of(slice(half, None)))
    operands = (
      queries,
      keys,
      values,
      query_positions,
      places,
      implementation,
      options,
    )
    return (
      attention(*operands, sinks),
      of(slice(None)),
      with_sinks(merged, sinks),
    )

  return jax.jit(run)


@pytest.fixture
def small_chunks(monkeypatch):
  """Several chunks of queries, of slots and of pages."""
  monkeypatch.setattr(chunked, "QUERY_CHUNK", 16)
  monkeypatch.setattr(chunked, "LOGITS", 16 * 13)
  monkeypatch.setattr(chunked, "DEQUANTIZED", 11)
  monkeypatch.setattr(paged_xla, "MAX_DEQUANTIZED", 16)
  monkeypatch.setattr(mass_xla, "_LOGITS", 61 * 11)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
  ("name", "shape", "implementation"),
  [(name, "query chunks", "chunked") for name in OPTIONS]
  + [(name, "one query", "chunked") for name in SOME]
  + [(name, "a few", "chunked") for name in SOME]
  + [(name, "a few", "reference") for name in OPTIONS],
)
def test_attention(name, shape, implementation):
  options, operands = OPTIONS[name], layer(*SHAPES[shape])
  sinks = sinks_of(operands[0].shape[1])
  run = whole_and_parts(options, implementation)
  output, without, merged = run(*operands, sinks)
  expected, lse = by_hand(*operands, options, sinks)
  assert_close(output, expected)
  assert_partial(without, by_hand(*operands, options))
  assert_partial(
    merged, (expected, np.logaddexp(lse, np.asarray(sinks)[:, None]))
  )
  alone = np.isneginf(lse)
  assert alone.any() == (shape != "one query" or name == "a window of 1")
  assert not np.any(np.asarray(output)[alone])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shape", ["one query", "query chunks"])
def test_attention_in_bfloat16(shape):
  operands = layer(*SHAPES[shape], "bfloat16")
  sinks = sinks_of(operands[0].shape[1])
  run = whole_and_parts(EVERYTHING, "chunked")
  output, without, merged = run(*operands, sinks)
  assert {x.dtype for x in (output, without.output, merged.output)} == {
    jnp.dtype("bfloat16")
  }
  # Products are exact; rounded, each by 2^-9 of it at most, are the weights,
  # then the output: of a part, of the merged parts, and with the sinks.
  most = most_of(operands[2])
  expected, _ = by_hand(*operands, EVERYTHING, sinks)
  assert_close(output, expected, 3 * 2**-9 * most)
  assert_close(merged.output, expected, 4 * 2**-9 * most)
  assert_partial(without, by_hand(*operands, EVERYTHING), 2 * 2**-9 * most)


@pytest.mark.usefixtures("small_chunks")
def test_attention_to_eight_bits():
  q, k, v, *where = layer(*SHAPES["query chunks"])
  sinks = sinks_of(6)
  small = [quantize(jnp.nan_to_num(x), "int8") for x in (k, v)]
  whole = [np.float64(x.qvalue) * np.float64(x.scale) for x in small]
  run = jax.jit(
    lambda *operands: attention(*operands, "chunked", EVERYTHING, sinks)
  )
  expected, _ = by_hand(q, *whole, *where, EVERYTHING, sinks)
  assert_close(run(q, *small, *where), expected)


@pytest.mark.parametrize("S", [None, 3])
def test_a_sink_of_nothing_changes_nothing(S):
  """For attention of one token, too, which has no axis of queries."""
  rng = np.random.default_rng(0)
  axes = (2, 4) if S is None else (2, 4, S)
  lse = rng.normal(size=axes)
  lse[0, 0] = -np.inf
  output = np.where(np.isneginf(lse)[..., None], 0, rng.normal(size=(*axes, 5)))
  operands = Partial(*(jnp.asarray(x, jnp.float32) for x in (output, lse)))
  none = with_sinks(operands, jnp.full(4, -jnp.inf))
  np.testing.assert_allclose(none.output, operands.output, rtol=1e-6)
  np.testing.assert_allclose(none.lse, operands.lse, rtol=1e-6)
  some = with_sinks(operands, jnp.zeros(4, jnp.bfloat16))
  share = 1 / (1 + np.exp(-lse))
  np.testing.assert_allclose(some.output, output * share[..., None], rtol=1e-5)
  np.testing.assert_allclose(some.lse, np.log1p(np.exp(lse)), rtol=1e-5)


@pytest.mark.parametrize(
  ("window", "visits"),
  # Of 8 chunks of 8 slots, for queries 8 at a time: those up to the queries',
  # as far as the window of the first of them reaches.
  [(None, 36), (1000, 36), (1, 8), (2, 15), (9, 15), (10, 21)],
)
def test_chunks_outside_the_window_are_skipped(monkeypatch, window, visits):
  monkeypatch.setattr(chunked, "QUERY_CHUNK", 8)
  monkeypatch.setattr(chunked, "LOGITS", 64)
  count, update = [], chunked._update

  def counted(*operands):
    jax.debug.callback(lambda: count.append(None))
    return update(*operands)

  monkeypatch.setattr(chunked, "_update", counted)
  options = AttentionOptions(window=window)
  rng = np.random.default_rng(0)
  q, k, v = rng.normal(size=(3, 2, 1, 64, 4)).astype("float32")
  places = np.tile(np.arange(64, dtype=np.int32), (2, 1))
  places[1, 40:] = -1
  operands = (*map(jnp.asarray, (q, k, v, places, places[:, None])),)
  actual = jax.jit(lambda *x: attention(*x, options=options))(*operands)
  assert_close(actual, by_hand(*operands, options)[0])
  jax.effects_barrier()
  assert len(count) == visits


def paged(keys, values, places, P=8):
  """The slots in pages, out of order, one of which is unused."""
  B, K, T = places.shape
  rng = np.random.default_rng(0)
  keys, values, places = map(np.asarray, (keys, values, places))

  def cut(x, fill):
    wide = ((0, 0), (0, 0), (0, -T % P), *((0, 0),) * (x.ndim - 3))
    x = np.pad(x, wide, constant_values=fill)
    x = x.reshape(B, -1, P, *x.shape[3:])
    unused = np.full_like(x[:, :1], fill)
    return np.concatenate([x, unused], axis=1)

  pages = [cut(keys, np.nan), cut(values, np.nan), cut(places, -1)]
  count = pages[0].shape[1] - 1
  heads = np.append(np.repeat(np.arange(K), count // K), -1)
  pages.append(np.tile(heads.astype(np.int32), (B, 1)))
  pages[2][:, -1] = 3  # an unused page drops out whatever it holds
  order = np.array([rng.permutation(count + 1) for _ in range(B)])
  rows = np.arange(B)[:, None]
  return tuple(jnp.asarray(x[rows, order]) for x in pages)


def run_paged(program, options, K):
  """From what `layer` gives."""

  def run(queries, keys, values, query_positions, pages, heads):
    return program(
      queries, keys, values, query_positions, pages, heads, K, options=options
    )

  return jax.jit(run)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
  ("name", "shape", "program"),
  [(name, "a few", paged_attention) for name in OPTIONS]
  + [(name, "query chunks", paged_attention) for name in SOME]
  + [(name, "one query", paged_attention) for name in SOME]
  + [(name, "a few", paged_attention_reference) for name in SOME],
)
def test_paged_attention(name, shape, program):
  options, operands = OPTIONS[name], layer(*SHAPES[shape])
  q, k, v, query_positions, places = operands
  keys, values, pages, heads = paged(k, v, places)
  run = run_paged(program, options, k.shape[1])
  actual = run(q, keys, values, query_positions, pages, heads)
  assert_partial(actual, by_hand(*operands, options))
  if program is paged_attention and name == "everything":
    small = [quantize(jnp.nan_to_num(x), "int8") for x in (keys, values)]
    whole = (x.qvalue.astype("float32") * x.scale for x in small)
    expected = run(q, *whole, query_positions, pages, heads)
    actual = run(q, *small, query_positions, pages, heads)
    assert_partial(actual, expected)


def test_paged_attention_in_bfloat16():
  operands = layer(*SHAPES["one query"], "bfloat16")
  q, k, v, query_positions, places = operands
  keys, values, pages, heads = paged(k, v, places)
  run = run_paged(paged_attention, EVERYTHING, k.shape[1])
  actual = run(q, keys, values, query_positions, pages, heads)
  # Rounded are the weights and the output.
  assert actual.output.dtype == jnp.bfloat16
  tolerance = 2 * 2**-9 * most_of(v)
  assert_partial(actual, by_hand(*operands, EVERYTHING), tolerance)


def listed(B, N, K, H, M, T, D, W, bias):
  """A query per head and lists of up to M slots, NaN in all others."""
  rng = np.random.default_rng(H)
  slots = np.full((B, H, M), -1, np.int32)
  keys, values = np.full((B, K, T, D), np.nan), np.full((B, K, T, W), np.nan)
  for b, h in np.ndindex(B, H):
    count = M - 1 - 2 * h if (b, h) != (1, 0) else 0
    own = rng.permutation(T)[:count]
    slots[b, h, rng.permutation(M)[:count]] = own
    keys[b, h * K // H, own] = rng.normal(size=(count, D))
    values[b, h * K // H, own] = rng.normal(size=(count, W))
  extra = rng.normal(size=(B, N, M))
  extra[rng.random(extra.shape) < 0.2] = -np.inf
  arrays = (rng.normal(size=(B, N, D)), keys, values)
  arrays = tuple(jnp.asarray(x, jnp.float32) for x in arrays)
  return *arrays, jnp.asarray(slots), jnp.asarray(extra, "f4") if bias else None


def listed_by_hand(queries, keys, values, slots, bias, options, sinks):
  queries, keys, values = (np.float64(x) for x in (queries, keys, values))
  slots = np.asarray(slots)
  B, N, D = queries.shape
  output, lse = np.zeros((B, N, values.shape[-1])), np.full((B, N), -np.inf)
  for b, n in np.ndindex(B, N):
    k, total = n * keys.shape[1] // N, 0.0
    for m, slot in enumerate(slots[b, n * slots.shape[1] // N]):
      if slot < 0:
        continue
      logit = keys[b, k, slot] @ queries[b, n] * (options.scale or D**-0.5)
      if options.softcap is not None:
        logit = options.softcap * math.tanh(logit / options.softcap)
      weight = math.exp(logit + (0 if bias is None else float(bias[b, n, m])))
      total += weight
      output[b, n] += weight * values[b, k, slot]
    if total:
      output[b, n] /= total + math.exp(sinks[n])
      lse[b, n] = math.log(total)
  return output, np.logaddexp(lse, np.float64(sinks))


@pytest.mark.parametrize(
  ("name", "H", "bias", "program"),
  [
    ("plain", 2, False, sparse_decode),
    ("a scale", 4, True, sparse_decode),
    ("a cap", 2, True, sparse_decode),
    ("everything", 4, False, sparse_decode),
    ("everything", 2, True, sparse_decode_reference),
  ],
)
def test_sparse_decode(name, H, bias, program):
  options = dataclasses.replace(OPTIONS[name], window=None)
  operands, sinks = listed(2, 4, 2, H, 11, 30, 8, 6, bias), sinks_of(4)
  run = jax.jit(
    lambda *x: with_sinks(program(*x, options=options), sinks_of(4))
  )
  assert_partial(run(*operands), listed_by_hand(*operands, options, sinks))


def test_lists_have_no_windows():
  operands = listed(2, 4, 2, 2, 11, 30, 8, 8, False)
  for implementation in (None, "xla", "pallas"):
    with pytest.raises(NotImplementedError, match="where tokens stand"):
      sparse_decode(*operands, implementation, AttentionOptions(window=5))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize(
  ("name", "shape", "program"),
  [(name, "query chunks", causal_mass) for name in OPTIONS]
  + [(name, "one query", causal_mass) for name in SOME]
  + [(name, "a few", causal_mass_reference) for name in SOME],
)
def test_causal_mass(name, shape, program, sinks):
  options = OPTIONS[name]
  queries, keys, _, query_positions, places = layer(*SHAPES[shape])
  sinks = sinks_of(queries.shape[1]) if sinks else None
  queries = jnp.where((query_positions < 0)[:, None, :, None], jnp.nan, queries)
  operands = queries, keys, query_positions, places
  run = jax.jit(lambda *x: program(*x, options=options, sinks=sinks))
  weights, _ = weights_of(
    jnp.nan_to_num(queries), *operands[1:], options, sinks
  )
  actual, expected = run(*operands), weights.sum(axis=2)
  assert_close(actual, expected, 1e-5 * max(1, expected.max()))


def test_causal_mass_of_bfloat16_is_exact():
  queries, keys, _, *where = layer(*SHAPES["a few"], "bfloat16")
  sinks = sinks_of(3)
  run = functools.partial(causal_mass, options=EVERYTHING, sinks=sinks)
  actual = jax.jit(run)(queries, keys, *where)
  weights, _ = weights_of(queries, keys, *where, EVERYTHING, sinks)
  assert actual.dtype == jnp.float32
  assert_close(actual, weights.sum(axis=2))


def prompts(N, K, S, D, W, dtype="float32", lengths=(101, 147)):
  """Rows of unequal lengths; the padding holds NaN."""
  rng = np.random.default_rng(S)
  real = np.arange(S)[None] < np.minimum(lengths, S)[:, None]

  def drawn(heads, width):
    x = rng.normal(size=(len(lengths), heads, S, width))
    return np.where(real[:, None, :, None], x, np.nan).astype(dtype)

  places = np.where(real, np.arange(S), -1).astype(np.int32)
  arrays = drawn(N, D), drawn(K, D), drawn(K, W), places
  return tuple(map(jnp.asarray, arrays))


def assert_prompts(actual, operands, options, sinks=None, tolerance=1e-5):
  """What comes out for tokens."""
  *arrays, places = operands
  slots = np.broadcast_to(np.asarray(places)[:, None], arrays[1].shape[:3])
  expected, _ = by_hand(*arrays, places, slots, options, sinks)
  for row, length in enumerate((np.asarray(places) >= 0).sum(axis=1)):
    ours = actual[row, :, :length]
    assert_close(ours, expected[row, :, :length], tolerance)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", SOME)
def test_prompt_attention(name):
  operands, sinks = prompts(4, 2, 47, 8, 12, lengths=(20, 47)), sinks_of(4)
  run = functools.partial(
    prompt_attention, options=OPTIONS[name], sinks=sinks_of(4)
  )
  assert_prompts(jax.jit(run)(*operands), operands, OPTIONS[name], sinks)


@pytest.mark.parametrize(
  ("options", "sinks", "dtype", "W"),
  [
    (AttentionOptions(window=1), False, "float32", 64),
    (AttentionOptions(window=40, scale=0.2), True, "float32", 64),
    (AttentionOptions(window=129, softcap=2.0), False, "float32", 128),
    (AttentionOptions(softcap=5.0, scale=0.1), True, "bfloat16", 32),
  ],
)
def test_splash_attention(monkeypatch, options, sinks, dtype, W):
  monkeypatch.setattr(tpu, "BLOCK", 128)
  operands = prompts(4, 2, 147, 64, W, dtype)
  sinks = sinks_of(4) if sinks else None
  run = functools.partial(prompt_attention, options=options, sinks=sinks)
  with on_tpu():
    actual = jax.jit(run)(*operands)
  assert actual.dtype == dtype
  # In bfloat16 scaled queries are rounded besides weights and output: a logit,
  # below 5 in size, by 5 * 2^-9, and a weight by twice as much.
  tolerance = 3e-2 if dtype == "bfloat16" else 1e-5
  assert_prompts(actual, operands, options, sinks, tolerance)


def test_every_device_of_a_mesh_has_the_sinks_of_its_heads():
  mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)
  operands = prompts(4, 2, 20, 64, 64, lengths=(9, 20))
  sinks, options = sinks_of(4), AttentionOptions(window=6)
  run = functools.partial(prompt_attention, options=options)
  with on_tpu(), jax.set_mesh(mesh):
    actual = jax.jit(lambda *x: run(*x[:-1], sinks=x[-1]))(*operands, sinks)
  assert_prompts(actual, operands, options, sinks)


@pytest.mark.parametrize("window", [1, 2, 128, 129, 130, 257, 600, 5000])
def test_blocks_of_windows_are_what_splash_attention_finds(window):
  mask = masks.LocalMask((5 * 128,) * 2, (window - 1, 0), 0)
  wanted, _ = mask_info.process_mask(
    masks.MultiHeadMask([mask] * 2), (128, 128)
  )
  actual = tpu.causal_blocks(5, 128, window)
  for ours, theirs in zip(actual, wanted, strict=True):
    assert (ours is None) == (theirs is None)
    if ours is not None:
      np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def cudnn_there(monkeypatch):
  """As on a Hopper GPU that is not there."""
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
  monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)


@pytest.mark.usefixtures("cudnn_there")
def test_cudnn_is_told_scale_and_window():
  operands = prompts(4, 2, 139, 64, 64, "bfloat16")
  options = AttentionOptions(window=17, scale=0.3)
  run = functools.partial(prompt_attention, options=options)
  with kernels.use("pallas", "gpu"):
    traced = jax.jit(run).trace(*operands)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
  (call,) = re.findall(r"custom_call @__cudnn\$fmha.*", lowered)
  assert re.search(r"mask_type\\22: \\22CAUSAL\\22", call)
  assert float(re.search(r"fmha_scale\\22: ([\d.]+)", call)[1]) == 0.3
  assert re.search(r"sliding_window_length\\22: (\d+)", call)[1] == "17"


CAP = AttentionOptions(softcap=3.0)
# What is not plain: options, whether there are sinks, and the width of values.
DECLINED = {
  "a window": (AttentionOptions(window=5), False, 64),
  "logits scaled by 0.3": (AttentionOptions(scale=0.3), False, 64),
  "capped logits": (CAP, False, 64),
  "sinks": (AttentionOptions(), True, 64),
  "keys of 64 and values of 32 entries": (AttentionOptions(), False, 32),
}


def assert_declined(platform, reason, run, check):
  """The kernel refuses in a sentence; asked for no kernel, XLA answers."""
  with (
    kernels.use("pallas", platform),
    # JAX adds lines about its own frames.
    pytest.raises(NotImplementedError, match=rf"kernel for {reason}\.(\n|$)"),
  ):
    run()
  with kernels.use(platform=platform):
    check(run())


@pytest.mark.usefixtures("cudnn_there")
@pytest.mark.parametrize("reason", DECLINED)
def test_cudnn_declines_what_it_does_not_know(reason):
  options, sinks, W = DECLINED[reason]
  operands = prompts(2, 1, 20, 64, W, "bfloat16", lengths=(9, 20))
  sinks = sinks_of(2) if sinks else None
  run = jax.jit(lambda *x: prompt_attention(*x, options=options, sinks=sinks))
  if options.window or options.scale:
    with kernels.use("pallas", "gpu"):
      assert jax.eval_shape(run, *operands).shape == (2, 2, 20, 64)
    return
  assert_declined(
    "gpu",
    reason,
    lambda: run(*operands),
    lambda actual: assert_prompts(
      actual, operands, options, sinks, 3 * 2**-9 * most_of(operands[2])
    ),
  )


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("reason", DECLINED)
def test_kernels_of_plain_attention_decline_the_rest(reason, platform):
  options, sinks, W = DECLINED[reason]
  operands = layer(2, 4, 2, 1, 37, 64, W)
  q, k, v, query_positions, places = operands
  if not sinks:
    keys, values, pages, heads = paged(k, v, places, P=32)
    paging = run_paged(paged_attention, options, 2)
    assert_declined(
      platform,
      reason,
      lambda: paging(q, keys, values, query_positions, pages, heads),
      lambda actual: assert_partial(actual, by_hand(*operands, options)),
    )
  if not sinks and options.window is None:
    lists = listed(2, 4, 2, 2, 11, 37, 64, W, False)
    decoding = jax.jit(lambda *x: sparse_decode(*x, options=options))
    none = np.full(4, -np.inf)
    assert_declined(
      platform,
      reason,
      lambda: decoding(*lists),
      lambda actual: assert_partial(
        actual, listed_by_hand(*lists, options, none)
      ),
    )
  if W == 64:
    sinks = sinks_of(4) if sinks else None
    mass = jax.jit(lambda *x: causal_mass(*x, options=options, sinks=sinks))
    weights, _ = weights_of(q, k, query_positions, places, options, sinks)
    assert_declined(
      platform,
      reason,
      lambda: mass(q, k, query_positions, places),
      lambda actual: assert_close(actual, weights.sum(axis=2)),
    )


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_scale_that_is_the_default_is_plain(platform):
  options = AttentionOptions(scale=1 / math.sqrt(128))
  q, k, v, query_positions, places = layer(1, 2, 1, 1, 37, 128, 128, "bfloat16")
  keys, values, pages, heads = paged(k, v, places, P=32)
  lists = jnp.zeros((1, 1, 40), jnp.int32)
  with kernels.use("pallas", platform):
    for run, operands in (
      (
        functools.partial(causal_mass, options=options),
        (q, k, query_positions, places),
      ),
      (
        functools.partial(sparse_decode, options=options),
        (q[:, :, 0], k, v, lists),
      ),
      (
        functools.partial(paged_attention, kv_heads=1, options=options),
        (q, keys, values, query_positions, pages, heads),
      ),
    ):
      assert jax.eval_shape(run, *operands) is not None
