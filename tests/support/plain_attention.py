"""Attention with every option, as loops in float64, and data for it."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kvjax import kernels
from kvjax.kernels.attention import AttentionOptions

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
