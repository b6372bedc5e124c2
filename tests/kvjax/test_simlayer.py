"""SimLayerKV by a threshold: lazy layers keep their ends, others all."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.testing import TinyModel, kept_positions

SPEC = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8)
MODEL = TinyModel(kvjax.Geometry((SPEC,) * 4, 512))
NAME = "simlayerkv:sinks=2:recent=6"
LENGTHS = (45, 21)


def of_two_kinds():
  """A model of which two layers attend alike to all tokens."""
  params = MODEL.init()
  stack = params["layers"][0]
  flat = jnp.asarray([0.0, 1.0, 0.0, 1.0])[:, None, None]
  # Their queries are sharp; those of the others are zero.
  return {**params, "layers": [{**stack, "query": stack["query"] * flat * 6}]}


def rows():
  draw = np.random.default_rng(5)
  return [draw.integers(0, 64, n).tolist() for n in LENGTHS]


def lazy_layers(params, texts, threshold):
  """For each row, whether a layer keeps its ends alone."""
  prompts = kvjax.Prompts.of(texts)
  plan = kvjax.get_plan(NAME, kvjax.Threshold(threshold, window=1))
  cache, _ = kvjax.prefill(MODEL, params, prompts, plan)
  found = []
  for row, text in enumerate(texts):
    ends = [0, 1, *range(len(text) - 5, len(text))]
    kept = kept_positions(cache, row)
    for layer in kept:
      assert layer in ([ends] * 2, [list(range(len(text)))] * 2)
    found.append([layer[0] == ends for layer in kept])
  return found


def masses(params, text):
  """The attention of the last query that is not on the ends, by layer."""
  found = {}

  def listen(layer, x):
    found[int(layer)] = float(x)

  method = kvjax.get_method(NAME)
  scores = type(method).scores

  class Told(type(method)):
    def scores(self, layer, cache, activations):
      result = scores(self, layer, cache, activations)
      jax.debug.callback(listen, layer, result[0, 0, 0])
      return result

  plan = kvjax.Plan(Told(2, 6), kvjax.Retention(0.5))
  cache, _ = kvjax.prefill(MODEL, params, kvjax.Prompts.of([text]), plan)
  jax.block_until_ready(cache)
  jax.effects_barrier()
  return [found[layer] for layer in sorted(found)]


def test_lazy_layers_lose_their_middle_and_each_row_decides_alone():
  params, texts = of_two_kinds(), rows()
  left = [masses(params, text) for text in texts]
  seen = set()
  # Between any two layers of either row.
  ordered = sorted(x for row in left for x in row)
  for low, high in itertools.pairwise(ordered):
    threshold = (low + high) / 2
    expected = [[x < threshold for x in row] for row in left]
    assert lazy_layers(params, texts, threshold) == expected
    seen |= {tuple(row) for row in expected}
  assert len(seen) > 2
  # Half of the layers do not know what a query asks for: 36 of 45 tokens in the
  # middle get as much of their attention.
  np.testing.assert_allclose(left[0][0], 1 - (2 + 6) / 45, atol=1e-5)


def test_the_extremes_keep_everything_and_the_ends():
  params, texts = MODEL.init(), rows()
  assert not np.any(lazy_layers(params, texts, 0.0))
  assert np.all(lazy_layers(params, texts, 1.0))


def test_a_budget_is_still_shared_by_all_layers():
  plan = kvjax.get_plan(NAME, kvjax.Retention(0.5))
  assert plan.spread.whole_model
  with pytest.raises(InputError, match="cannot be spread unevenly"):
    kvjax.get_plan(f"ada/{NAME}", kvjax.Retention(0.5))


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_a_budget_below_the_ends_keeps_the_sinks_and_fewer_recent(budget):
  texts = rows()
  plan = kvjax.get_plan("simlayerkv:sinks=2:recent=20", kvjax.Tokens(budget))
  cache, _ = kvjax.prefill(MODEL, MODEL.init(), kvjax.Prompts.of(texts), plan)
  for row, text in enumerate(texts):
    n, first = len(text), min(2, budget)
    expected = [*range(first), *range(n - budget + first, n)]
    for layer in kept_positions(cache, row):
      assert layer == [expected] * 2
