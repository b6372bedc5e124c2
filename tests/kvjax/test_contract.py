"""What the choice of every eviction method keeps to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import CASES, FORMULAS, GATED, base_of

import kvjax
from kvjax.allocation import Sizes
from kvjax.cache.layers import LayerCache
from kvjax.cache.packed import PackedLayer
from kvjax.methods import LayerBudget
from kvjax.prompts import bucket_lengths
from kvjax.registry.names import get_recipe
from kvjax.registry.registry import METHODS
from kvjax.testing import checks, layer_positions

LENGTHS = [61, 96, 40]
PADDED = 96
BUDGETS = (kvjax.Tokens(1), kvjax.Tokens(20), kvjax.Retention(0.5))
# In the middle of a pyramid.
LAYER, LAYERS = 2, 5


def blind(name):
  """Whether the choice is the same whatever the tokens are."""
  traits = CASES[name].method.traits
  # SimLayerKV chooses among layers, and these tests have one.
  by_layer = base_of(name)[0] == "simlayerkv"
  return traits.keeps_all or traits.positional or by_layer


def coarse(name):
  """Whether it may leave room, as what keeps whole chunks or clusters."""
  return bool(CASES[name].method.traits.coarse)


def spread_of(recipe):
  return recipe.allocation or recipe.method.allocation


def first_and_last(name, n, count):
  """How many of the first and last tokens of a row of n stay, by the papers.

  Beside the last ones that the method's traits name.
  """
  base, preset = base_of(name)
  match base:
    case "streaming":
      return (0 if "sinks=0" in name else min(4, count)), 0
    case "compactor" if preset in ("compactor.kvpress", "compactor.vllm"):
      return 2, 3
    case "keydiff":
      return 0, count // 5 if "recent_frac=0.2" in name else 0
    case "h2o" if "recent=8" in name:
      return 0, 8
    case "h2o" if preset not in ("h2o.keydiff", "h2o.kvpress"):
      return 0, count // 2
    case "cur" | "expected_attention":
      return 4, 0
    case "fast_kvzip":
      return 4, n // 20
    case "duoattention":
      return min(3, count // 2), 0
    case "simlayerkv":
      return min(3, count), 0
    case "tova" if preset == "tova.kvpress":
      return 0, 1
    case "kvzip" if preset.startswith("kvzip.kvpress"):
      return 4, 0
    case "lagkv":
      sinks, lag = 2, 5 if "lag=5" in name else 6
      if n >= sinks + 2 * lag:
        return sinks, lag + (n - sinks) % lag
      # What kvpress has over goes by recency.
      return sinks, 0 if preset == "lagkv.kvpress" else n - sinks
  return 0, 0


def must_stay(name, n, count):
  """Positions that a row of n tokens may not lose."""
  first, last = first_and_last(name, n, count)
  last = max(last, CASES[name].method.traits.protects)
  if base_of(name)[0] == "simlayerkv":
    # Of a small budget, it keeps the first tokens.
    last = min(last, count - first)
  places = [*range(first), *range(max(n - last, first), n)]
  return set(places[-count:])


def layer_total(name, budget, n, count, heads):
  """Tokens that heads which share a budget keep together."""
  spread = spread_of(CASES[name])
  # The heads of a layer alone share nothing where all layers share a budget.
  joint = not (spread.votes or spread.whole_model)
  if not (joint and isinstance(budget, kvjax.Retention)):
    return heads * count
  return int(heads * (n - sum(first_and_last(name, n, 0))) * budget.share + 0.5)


def run(recipe, seen, counts, total, capacity):
  method, spread = recipe.method, spread_of(recipe)
  seen = seen.only(method.traits.activations)
  cache = LayerCache.of(seen)
  if method.traits.keeps_layer(LAYER):
    return cache
  with jax.default_matmul_precision("highest"):
    found = spread.evaluate(method, jnp.int32(LAYER), cache, seen)
  budget = LayerBudget(counts, seen.positions.shape[1], total=total)
  slots = spread.select(method, found, cache, budget)
  if spread.ragged:
    return PackedLayer.of(cache, slots, seen.keys.shape[1] * capacity)
  return cache.take(slots[..., :capacity])


compiled = functools.partial(jax.jit, static_argnums=(0, 4))(run)


def sizes_of(recipe, heads=3):
  return Sizes((heads,) * LAYERS, recipe.method.traits.protects)


def counts_of(recipe, lengths=LENGTHS, heads=3):
  """For every budget, what the rows keep per head, and all heads together."""
  spread, sizes = spread_of(recipe), sizes_of(recipe, heads)
  return [
    [
      law(budget, np.array(lengths), sizes)[LAYER]
      for law in (spread.counts, spread.totals)
    ]
    for budget in BUDGETS
  ]


def capacities_of(recipe, padded):
  """For every budget, the slots of a bucket's caches."""
  spread, sizes = spread_of(recipe), sizes_of(recipe)
  return [int(spread.capacities(b, padded, sizes)[LAYER]) for b in BUDGETS]


def kept(recipe, seen, lengths=LENGTHS, run=compiled):
  """Positions kept with each budget, per row and head, as lists.

  All in slots for the largest budget, so that one program serves them.
  """
  both = counts_of(recipe, lengths, seen.keys.shape[1])
  padded = seen.positions.shape[1]
  own = max(int(counts.max()) for counts, _ in both)
  most = max(own, *capacities_of(recipe, padded))
  found = []
  for counts, totals in both:
    layer = run(recipe, seen, jnp.asarray(counts), jnp.asarray(totals), most)
    found.append([layer_positions(layer, row) for row in range(len(lengths))])
  return found


def activations(seed, **options):
  """Of six query heads and three KV heads, with all that methods can read."""
  return checks.all_activations(seed, LENGTHS, PADDED, **options)


# Compiling takes nearly all the time: these need programs of their own.
NAMED = [name for name in CASES if name in METHODS]
DRAWING = [
  name for name, recipe in CASES.items() if recipe.method.traits.stochastic
]


def rows_of(seen, rows, padded=PADDED):
  """Some of the rows, padded to another length."""
  return checks.rows_of([(seen, row) for row in rows], padded)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow if name in FORMULAS else ())
    for name in CASES
  ],
)
class TestMethod:
  def test_keeps_its_budget_sorted_unique_and_protected(self, name):
    recipe = CASES[name]
    method, spread = recipe.method, spread_of(recipe)
    sizes = sizes_of(recipe)
    lengths = np.array(bucket_lengths(PADDED))
    for budget, capacity in zip(
      BUDGETS, capacities_of(recipe, PADDED), strict=True
    ):
      assert capacity >= spread.counts(budget, lengths, sizes)[LAYER].max()
    found = kept(recipe, activations(0))
    for budget, rows, (counts, _) in zip(
      BUDGETS, found, counts_of(recipe), strict=True
    ):
      for heads, n, count in zip(rows, LENGTHS, counts.tolist(), strict=True):
        expected = n if method.traits.keeps_layer(LAYER) else count
        if spread.ragged:
          total = layer_total(name, budget, n, count, len(heads))
          left = total - sum(map(len, heads))
          assert left >= 0 if coarse(name) else left == 0
        for places in heads:
          if coarse(name):
            assert 1 <= len(places) <= (total if spread.ragged else expected)
          elif not spread.ragged:
            assert len(places) == expected
          assert places == sorted(set(places))
          assert set(places) <= set(range(n))
          assert must_stay(name, n, count) <= set(places)

  def test_the_choice_follows_from_the_activations(self, name):
    """Else none of these tests could fail; but for the smallest budget."""
    recipe = CASES[name]
    one, other = (kept(recipe, activations(seed)) for seed in (6, 9))
    for rows, others in zip(one[1:], other[1:], strict=True):
      for heads, other_heads in zip(rows, others, strict=True):
        same = [a == b for a, b in zip(heads, other_heads, strict=True)]
        assert same == [blind(name)] * 3

  def test_a_row_stands_alone(self, name):
    """Whatever its batch mates and its place among them."""
    recipe, seen, others = CASES[name], activations(1), activations(11)
    mixed = checks.rows_of([(seen, 2), (others, 1), (seen, 0)], PADDED)
    together = kept(recipe, seen)
    apart = kept(recipe, mixed, LENGTHS[::-1])
    for rows, turned in zip(together, apart, strict=True):
      assert [turned[2], turned[0]] == [rows[0], rows[2]]

  def test_heads_are_treated_alike(self, name):
    recipe = CASES[name]
    if recipe.method.traits.stochastic:
      pytest.skip("it draws numbers per head")
    if base_of(name)[0] in GATED:
      pytest.skip("it has weights for every head")
    seen = activations(3)
    order = np.array([2, 0, 1])
    query_order = np.concatenate([[2 * k, 2 * k + 1] for k in order])
    turned = dataclasses.replace(
      seen,
      queries=seen.queries[:, query_order],
      keys=seen.keys[:, order],
      values=seen.values[:, order],
      keys_unrotated=seen.keys_unrotated[:, order],
      queries_unrotated=seen.queries_unrotated[:, query_order],
      output_projection=seen.output_projection[query_order],
      replayed=seen.replayed[:, query_order],
    )
    plain, permuted = kept(recipe, seen), kept(recipe, turned)
    for rows, turned_rows in zip(plain, permuted, strict=True):
      assert [[row[k] for k in order] for row in rows] == turned_rows

  def test_scores_are_float32(self, name):
    seen = activations(4, dtype="bfloat16")
    method = CASES[name].method
    found = jax.eval_shape(
      lambda layer, seen: method.evaluate(layer, LayerCache.of(seen), seen),
      jnp.int32(LAYER),
      seen,
    )
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(found)}
    assert dtypes <= {jnp.dtype("float32"), jnp.dtype("int32")}

  def test_a_key_that_is_not_a_number_harms_its_own_row_only(self, name):
    """Scores that are no numbers count as the lowest."""
    recipe = CASES[name]
    seen = activations(5)
    broken = dataclasses.replace(
      seen,
      keys=seen.keys.at[1, 0, 7, 2].set(jnp.nan),
      keys_unrotated=seen.keys_unrotated.at[1, 0, 7, 2].set(jnp.nan),
    )
    for whole, harmed in zip(
      kept(recipe, seen), kept(recipe, broken), strict=True
    ):
      assert [harmed[0], harmed[2]] == [whole[0], whole[2]]
      if not coarse(name):
        assert sum(map(len, harmed[1])) == sum(map(len, whole[1]))
      for places in harmed[1]:
        assert places == sorted(set(places))
        assert set(places) <= set(range(LENGTHS[1]))


@pytest.mark.parametrize(
  "name",
  [
    *NAMED,
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in DRAWING
      if name not in NAMED
    ),
  ],
)
def test_neither_padding_nor_a_cache_in_bfloat16_changes_anything(name):
  """Keys of 16 bits are scored as their float32 copies."""
  recipe, narrow = CASES[name], activations(4, dtype="bfloat16")
  wide = jax.tree.map(
    lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, narrow
  )
  together = kept(recipe, wide)
  # One program for both; the row between them has no padding to lose.
  for row in (0, 2):
    alone = kept(recipe, rows_of(narrow, [row], 62), [LENGTHS[row]])
    assert [rows[0] for rows in alone] == [rows[row] for rows in together]


# Step by step everything compiles by itself: few of them.
@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    *("lagkv", "compactor"),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("h2o", "protokv")),
  ],
)
def test_jit_equals_eager(name):
  recipe, seen = CASES[name], activations(2)
  counts, totals = map(jnp.asarray, counts_of(recipe)[1])
  most = max(capacities_of(recipe, PADDED))
  jitted, eager = (
    program(recipe, seen, counts, totals, most) for program in (compiled, run)
  )
  for row in range(len(LENGTHS)):
    assert layer_positions(jitted, row) == layer_positions(eager, row)


def test_another_seed_keeps_other_tokens():
  one, two = (
    kept(get_recipe(f"random:seed={seed}"), activations(5)) for seed in (0, 1)
  )
  assert one != two


def test_chance_is_another_for_every_sample():
  """But the same for what samples have in common, as for their first tokens."""
  one, other = activations(5), activations(6)
  first = np.arange(PADDED)[:, None] < 30
  other = dataclasses.replace(
    other, keys=jnp.where(first, one.keys, other.keys)
  )
  method, layer = get_recipe("random").method, jnp.int32(0)
  scores, others = (
    method.evaluate(layer, LayerCache.of(seen), seen) for seen in (one, other)
  )
  np.testing.assert_array_equal(scores[..., :30], others[..., :30])
  assert not np.any(scores[1, :, 30:] == others[1, :, 30:])
