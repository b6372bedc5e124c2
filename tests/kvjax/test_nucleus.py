"""The most likely tokens that reach `top_p`, found without sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.sampling import _nucleus


def nucleus_by_hand(logits, top_p):
  """By sorting, in float64; also what the tokens before each one reach."""
  exact = np.asarray(logits, np.float64)
  share = np.exp(exact - exact.max())
  share /= share.sum()
  order = np.argsort(-exact, kind="stable")
  before = np.empty_like(share)
  before[order] = np.cumsum(share[order]) - share[order]
  kept = before < top_p
  kept[order[0]] = True
  return kept, before


LOGITS = {
  "peaked": 6.0 * jax.random.normal(jax.random.key(0), (3, 1000)),
  "flat": 0.01 * jax.random.normal(jax.random.key(1), (3, 1000)),
  "tied": jax.random.randint(jax.random.key(2), (3, 50), -2, 2).astype(float),
  "equal": jnp.zeros((2, 8)),
  "masked": jnp.full((1, 9), -jnp.inf)
  .at[0, 3:6]
  .set(jnp.array([1.0, -0.0, 0.0])),
}


@pytest.mark.parametrize("top_p", [1e-50, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("name", LOGITS)
def test_the_nucleus_is_that_of_sorted_tokens(name, top_p):
  logits = LOGITS[name].astype(jnp.float32)
  found = jax.jit(_nucleus)(logits, jnp.float32(top_p))
  for row, ours in zip(logits, found, strict=True):
    kept, before = nucleus_by_hand(row, top_p)
    # At the edge, sums in float32 may fall otherwise.
    clear = np.abs(before - top_p) > 1e-5
    clear |= top_p < 1e-5
    assert clear.sum() >= len(row) - 3
    np.testing.assert_array_equal(np.isfinite(ours)[clear], kept[clear])
    np.testing.assert_array_equal(ours[kept & clear], row[kept & clear])


def test_no_vocabulary_is_sorted():
  logits = jnp.zeros((2, 4096))
  program = jax.jit(_nucleus).lower(logits, jnp.float32(0.9)).compile()
  assert "sort(" not in program.as_text()
