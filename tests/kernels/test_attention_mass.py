"""Attention mass by tiles against the whole matrix and float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention_mass import api, causal_mass, chunk_mass
from kernels.attention_mass.reference import (
  causal_mass_reference,
  chunk_mass_reference,
)

D = 8


def block(seed, G, S, T, dtype="float32"):
  """S queries of a group at the end of T slots, some of them empty.

  Empty slots hold zeros and padding NaN, as where the methods call this.
  """
  draws = jax.random.split(jax.random.key(seed), 4)
  padding = jax.random.bernoulli(draws[2], 0.2, (S,))
  empty = jax.random.bernoulli(draws[3], 0.3, (T,))
  q = jax.random.normal(draws[0], (G, S, D))
  k = jax.random.normal(draws[1], (T, D)) * 2
  q = jnp.where(padding[None, :, None], jnp.nan, q).astype(dtype)
  k = jnp.where(empty[:, None], 0.0, k).astype(dtype)
  of = jnp.where(padding, -1, jnp.arange(S, dtype=jnp.int32) + T - S)
  at = jnp.where(empty, -1, jnp.arange(T, dtype=jnp.int32))
  return q, k, of, at


def by_hand(q, k, sees, scale):
  """Every query by itself, in float64."""
  q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
  mass = np.zeros((len(q), len(k)))
  for g, s in np.ndindex(*q.shape[:2]):
    slots = [t for t in range(len(k)) if sees(s, t)]
    if slots:
      weights = np.exp(k[slots] @ q[g, s] * scale)
      mass[g, slots] += weights / weights.sum()
  return mass


def causal(of, at):
  return lambda s, t: of[s] >= 0 and 0 <= at[t] <= of[s]


@pytest.mark.parametrize("run", [causal_mass, causal_mass_reference])
@pytest.mark.parametrize(
  ("G", "S", "T"), [(1, 1, 1), (2, 1, 37), (3, 5, 37), (1, 53, 53), (4, 53, 53)]
)
def test_causal_mass_equals_a_loop(G, S, T, run):
  q, k, of, at = block(0, G, S, T)
  found = jax.jit(run)(q, k, of, at)
  expected = by_hand(q, k, causal(np.asarray(of), np.asarray(at)), D**-0.5)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("logits", [1, 53 * 7, 2**19])
def test_the_size_of_the_tiles_does_not_matter(monkeypatch, logits):
  args = block(1, 2, 51, 53)
  monkeypatch.setattr(api, "_LOGITS", logits)
  np.testing.assert_allclose(
    causal_mass(*args), causal_mass_reference(*args), rtol=0, atol=1e-5
  )


def test_the_masses_sum_to_the_queries_that_see_a_key():
  q, k, of, at = block(2, 3, 29, 31)
  sees = causal(np.asarray(of), np.asarray(at))
  some = sum(any(sees(s, t) for t in range(31)) for s in range(29))
  mass = np.asarray(causal_mass(q, k, of, at))
  assert 0 < some < 29
  np.testing.assert_allclose(mass.sum(axis=1), some, rtol=1e-5)
  assert not np.any(mass[:, np.asarray(at) < 0])


@pytest.mark.parametrize("run", [chunk_mass, chunk_mass_reference])
@pytest.mark.parametrize(
  ("G", "chunk"), [(1, 8), (2, 41), (3, 64), (4, 8), (4, 1)]
)
def test_chunk_mass_equals_a_loop(G, chunk, run):
  q, k, _, at = block(3, G, 41, 41)
  held = at >= 0
  if chunk == 8:
    held = held.at[16:24].set(False)  # a chunk that holds nothing
  nan = jnp.where(held[:, None], k, jnp.nan)
  q = jnp.where(held[None, :, None], jnp.nan_to_num(q), jnp.nan)
  found = jax.jit(run, static_argnums=(3, 4))(q, nan, held, chunk, 0.3)
  mask = np.asarray(held)
  expected = by_hand(
    q, k, lambda s, t: mask[s] and mask[t] and s // chunk == t // chunk, 0.3
  )
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_bfloat16_is_widened_first():
  """Sums of many weights would not survive it."""
  q, k, of, at = block(4, 3, 67, 67, "bfloat16")
  wide = [x.astype("float32") for x in (q, k)]
  np.testing.assert_allclose(
    causal_mass(q, k, of, at),
    causal_mass_reference(*wide, of, at),
    rtol=0,
    atol=1e-5,
  )
  q, held = jnp.nan_to_num(q), at >= 0
  np.testing.assert_allclose(
    chunk_mass(q, k, held, 16, 0.5),
    chunk_mass_reference(*map(jnp.nan_to_num, wide), held, 16, 0.5),
    rtol=0,
    atol=1e-5,
  )


def test_logits_of_any_size_stay_finite():
  q, k, of, at = block(5, 2, 19, 19)
  mass = np.asarray(causal_mass(q * 300, k, of, at))
  expected = causal_mass_reference(q * 300, k, of, at)
  np.testing.assert_allclose(mass, expected, rtol=0, atol=1e-4)
  assert np.all(np.isfinite(mass))
