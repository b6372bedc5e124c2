"""Products with listed keys, a tile at a time, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import rows
from kvjax.cache.rows import Rows

BATCH, KV_HEADS, GROUP, SLOTS, DIM = 2, 3, 2, 70, 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
  monkeypatch.setattr(rows, "_TILE", 16)


def draw(listed, places):
  """Keys, queries, and lists of so many distinct slots in so many places."""
  rng = np.random.default_rng(0)
  keys = rng.standard_normal((BATCH, KV_HEADS, SLOTS, DIM)).astype("float32")
  queries = rng.standard_normal((BATCH, KV_HEADS, GROUP, DIM)).astype("float32")
  slots = np.full((BATCH, KV_HEADS, places), -1, np.int32)
  for number, count in enumerate(listed):
    row, head = divmod(number, KV_HEADS)
    chosen = np.sort(rng.permutation(SLOTS - 1)[:count]) + 1
    slots[row, head, :count] = chosen
  return keys, queries, slots


def expected(keys, queries, slots):
  listed = np.take_along_axis(keys, np.maximum(slots, 0)[..., None], axis=2)
  products = np.einsum(
    "bkgd,bkud->bkgu", queries.astype("float64"), listed.astype("float64")
  )
  return np.where(slots[:, :, None] >= 0, products / DIM**0.5, -np.inf)


@pytest.mark.parametrize("places", [16, 17, 50, 64])
@pytest.mark.parametrize(
  "listed",
  [
    (0, 0, 0, 0, 0, 0),
    (1, 0, 3, 0, 0, 2),
    (16, 15, 2, 1, 0, 16),
    (16, 16, 16, 16, 16, 16),
  ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_products_are_those_of_the_listed_keys(places, listed, stacked):
  keys, queries, slots = draw(listed, places)
  exact = expected(keys, queries, slots)
  # Slot 0 stands in for empty places and must not be seen.
  keys[:, :, 0] = np.nan
  store, layer = jnp.asarray(keys), None
  if stacked:
    store = jnp.stack([jnp.full_like(store, jnp.nan), store])
    layer = jnp.int32(1)
  got = jax.jit(
    lambda store, slots, queries: Rows(store, store, layer).logits(
      slots, queries
    )
  )(store, jnp.asarray(slots), jnp.asarray(queries))
  assert np.array_equal(np.isinf(got), np.isinf(exact))
  np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


def test_tiles_after_the_last_listed_key_are_not_read():
  """The trip count of the loop follows the fullest list."""
  _, queries, slots = draw((17, 1, 1, 1, 1, 1), 64)
  # All keys but slot 0 are large: what is read shows in the products.
  keys = jnp.ones((1, BATCH, KV_HEADS, SLOTS, DIM))
  last = jnp.max(jnp.where(slots >= 0, jnp.arange(1, 65), 0))
  products = rows._products_in_tiles(
    keys, jnp.int32(0), jnp.maximum(slots, 0), jnp.asarray(queries), last
  )
  read = np.any(np.asarray(products) != 0, axis=(0, 1, 2))
  assert read.tolist() == [True] * 32 + [False] * 32
