"""Attention to listed slots, against float64 loops and the plain reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention import merge
from kernels.sparse_decode import sparse_decode

B, T, D = 2, 40, 16
# KV heads, query heads per KV head, lists, slots of a list.
SHAPES = [(3, 2, 3, 11), (2, 4, 4, 17), (2, 3, 6, 1), (1, 1, 1, 40)]


@functools.cache
def case(shape, dtype="float32", bias=False):
  """Inputs, NaN in the slots that no list names."""
  kv_heads, group, lists, most = shape
  heads = kv_heads * group
  rng = np.random.default_rng(0)
  queries = rng.normal(size=(B, heads, D))
  keys, values = rng.normal(size=(2, B, kv_heads, T, D))
  slots = np.full((B, lists, most), -1, np.int32)
  named = np.zeros((B, kv_heads, T), bool)
  for b in range(B):
    for h in range(lists):
      count = min(most, 1 + 5 * h) if (b, h) != (1, 0) else 0
      place = rng.permutation(most)[:count]
      slots[b, h, place] = rng.permutation(T)[:count]
      named[b, h * kv_heads // lists, slots[b, h, place]] = True
  keys[~named], values[~named] = np.nan, np.nan
  extra = rng.normal(size=(B, heads, most)) if bias else None
  if bias:
    extra[rng.random(extra.shape) < 0.3] = -np.inf
    extra = jnp.asarray(extra, jnp.float32)
  arrays = (jnp.asarray(x, dtype) for x in (queries, keys, values))
  return *arrays, jnp.asarray(slots), extra


def by_hand(queries, keys, values, slots, bias):
  """Every head by itself, in float64."""
  queries, keys, values = (
    np.asarray(x).astype(np.float64) for x in (queries, keys, values)
  )
  output, lse = np.zeros(queries.shape), np.full(queries.shape[:2], -np.inf)
  heads = queries.shape[1]
  for b in range(B):
    for n in range(heads):
      k = n * keys.shape[1] // heads
      listed = np.asarray(slots[b, n * slots.shape[1] // heads])
      extra = np.zeros(len(listed)) if bias is None else np.asarray(bias[b, n])
      use = (listed >= 0) & np.isfinite(extra)
      logits = keys[b, k, listed[use]] @ queries[b, n] / D**0.5 + extra[use]
      if use.any():
        weights = np.exp(logits - logits.max())
        lse[b, n] = logits.max() + np.log(weights.sum())
        output[b, n] = weights @ values[b, k, listed[use]] / weights.sum()
  return output, lse


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_loop(shape, implementation, bias):
  inputs = case(shape, bias=bias)
  found = sparse_decode(*inputs, implementation=implementation)
  output, lse = by_hand(*inputs)
  np.testing.assert_allclose(found.output, output, atol=1e-5)
  np.testing.assert_allclose(found.lse, lse, atol=1e-5)
  assert not np.isfinite(lse).all()  # a list is empty


def test_bfloat16_keeps_its_dtype():
  inputs = case(SHAPES[0], "bfloat16")
  found = sparse_decode(*inputs)
  assert found.output.dtype == jnp.bfloat16
  output, _ = by_hand(*inputs)
  np.testing.assert_allclose(
    found.output.astype(jnp.float32), output, atol=2e-2 * np.abs(output).max()
  )


def test_parts_merge_to_the_joint_softmax():
  """Two disjoint lists are as good as one that holds both."""
  queries, keys, values, _, _ = case(SHAPES[3])
  values, keys = (jnp.nan_to_num(x) for x in (values, keys))
  order = jax.random.permutation(jax.random.key(1), T)
  slots = jnp.broadcast_to(order.astype(jnp.int32)[None, None], (B, 1, T))
  first = sparse_decode(queries, keys, values, slots[..., :13])
  second = sparse_decode(queries, keys, values, slots[..., 13:])
  whole = sparse_decode(queries, keys, values, slots)
  both = merge(first, second)
  np.testing.assert_allclose(both.output, whole.output, atol=1e-5)
  np.testing.assert_allclose(both.lse, whole.lse, atol=1e-5)
