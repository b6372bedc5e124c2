"""Rows of pages with random tokens, and attention to them by loops."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kvjax import kernels
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
