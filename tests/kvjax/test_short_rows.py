"""Rows that are shorter than what a method never scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.methods import LayerBudget
from kvjax.methods.last_queries import window_queries
from kvjax.registry.names import get_recipe
from kvjax.testing import TinyModel, layer_positions, random_activations


def test_the_last_queries_are_the_end_of_a_longer_window():
  seen = random_activations(4, [9, 5], 9)
  stored = ObservationWindow.empty(seen, 6).append(seen)
  cache = dataclasses.replace(LayerCache.of(seen), window=stored)
  queries, positions = window_queries(cache, seen, 3)
  assert positions.tolist() == [[6, 7, 8], [2, 3, 4]]
  for row, last in enumerate((9, 5)):
    np.testing.assert_array_equal(
      queries[row], seen.queries[row, :, last - 3 : last]
    )


def test_one_query_is_appended_as_the_first_of_a_block():
  """Rows that have ended append padding, and keep their window."""
  seen = random_activations(4, [9, 5], 9)
  stored = ObservationWindow.empty(seen, 6).append(seen)
  block = random_activations(5, [1, 0], 2).only(())
  alone = dataclasses.replace(
    block,
    queries=block.queries[:, :, :1],
    keys=block.keys[:, :, :1],
    values=block.values[:, :, :1],
    positions=block.positions[:, :1],
  )
  one, as_block = stored.append(alone), stored.append(block)
  np.testing.assert_array_equal(one.queries, as_block.queries)
  assert one.positions.tolist() == as_block.positions.tolist()
  assert one.positions.tolist() == [[4, 5, 6, 7, 8, 0], [-1, 0, 1, 2, 3, 4]]


def test_queries_that_move_may_be_fewer_than_the_window():
  """A row of 9 tokens has 9 queries, and the preset a window of 64."""
  model = TinyModel()
  prompts = kvjax.Prompts.of([[*range(1, 10)], [7, 8, 9]])
  plan = kvjax.get_plan("snapkv.kvpress_decoding", kvjax.Tokens(5))
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  assert cache.lengths[0].tolist() == [[5, 5], [3, 3]]


@pytest.mark.parametrize(
  "name",
  [
    "snapkv:window=8",
    "ada/snapkv:window=8",
    "chunkkv:window=8:chunk=2",
    "protokv:window=8:prototypes=6",
    "tova.kvpress",
  ],
)
def test_a_window_longer_than_the_row_keeps_to_the_budget(name):
  """The newest B of the window's tokens stay, though it holds the whole row.

  "A row no longer than the window stays as it is" and "protected tokens beyond
  the budget: the newest of them stay" speak of the same rows; the second wins,
  since a cache may never exceed its budget. TOVA protects one token.
  """
  n, counts = 6, (1, 4)
  seen = random_activations(8, [n, n], 9)
  method, allocation = get_recipe(name).method, get_recipe(name).allocation
  allocation = allocation or method.allocation

  @jax.jit
  def kept(seen):
    budget = LayerBudget(jnp.asarray(counts), max(counts))
    cache = LayerCache.of(seen)
    scores = allocation.evaluate(method, jnp.int32(0), cache, seen)
    return cache.take(allocation.select(method, scores, cache, budget))

  small = kept(seen)
  for row, count in enumerate(counts):
    for places in layer_positions(small, row):
      if name == "tova.kvpress":
        assert len(places) == count
        assert places[-1] == n - 1
      else:
        assert places == list(range(n - count, n))
