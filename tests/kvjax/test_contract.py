"""What the choice of every eviction method keeps to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.engine.step import compress

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.methods import (
  H2O,
  METHODS,
  PRESETS,
  Allowance,
  ChunkKV,
  Compactor,
  FullKV,
  KeyDiff,
  LagKV,
  ProtoKV,
  Random,
  SnapKV,
  StreamingLLM,
  Tova,
  get_method,
)
from kvjax.prompts import bucket_lengths
from kvjax.testing import (
  layer_positions,
  random_activations,
)

# What scores by another formula than a case beside it, and does nothing else
# otherwise, takes its turn with the slow tests.
FORMULAS = [
  "h2o.keydiff",
  "h2o.compactor",
  "tova.keydiff",
  "snapkv.factory",
  "snapkv.compactor",
  "lagkv.local",
  "lagkv.kvpress:lag=5",
  "compactor.vllm:sketch_dim=6",
  "compactor.kvpress:sketch_dim=6",
  "protokv.kmeans:iterations=2",
  "key_norm.lagkv",
  "streaming:sinks=0",
  "keydiff:anchor=median_unit",
  "keydiff:anchor=median_raw:metric=dot",
  "keydiff:anchor=mean_raw:metric=euclid",
  "snapkv:group=max",
  "h2o:recent=8",
  "chunkkv:chunk=3",
  "lagkv:value_weight=0.0:ddof=0",
  "lagkv.kvpress:cross_scoring=true",
  "compactor.vllm:sketch=none",
  "compactor:solver=qr:sketch_dim=6",
  "protokv:cut=none:score=qk_mean",
  "protokv:score=attn_mean",
]
OPTIONS = [
  *FORMULAS,
  "random:seed=3",
  "keydiff:anchor=pairwise",
  "keydiff:recent_frac=0.2",
  "chunkkv:scope=head",
  "pyramid/keydiff",
  "ada/keydiff",
  "ada/snapkv.kvpress",
  "adakv:alpha=0.5:normalize=true",
  "ada/protokv",
  "ada/chunkkv",
  "pyramid/protokv",
  "pyramid/ada/snapkv:window=4",
  "lagkv.key_norm:skip_layers=0",
  "compactor:sketch=none",
  "compactor:sketch=srht:value_norm=l1:pool=5",
  "compactor:solver=eig:center=true",
  "protokv:cut=skip",
  "protokv:cut=position:split=ceil_len:sign=literal",
  "protokv:hash=hyperplane:include_self=false",
]
# On rows this short the papers' sizes keep the newest tokens, or all of them,
# whatever the tokens are: no option may be larger than these.
SMALL = {
  SnapKV: {"window": 5},
  ChunkKV: {"window": 5, "chunk": 4},
  LagKV: {"sinks": 2, "lag": 6},
  Compactor: {"chunk": 16, "leverage_chunk": 20, "first": 2, "last": 3},
  ProtoKV: {"window": 5, "prototypes": 20, "bits": 3},
}


def small(method):
  """The method, with sizes that bite."""
  if hasattr(method, "inner"):
    return dataclasses.replace(method, inner=small(method.inner))
  most = SMALL.get(type(method), {})
  sizes = {name: min(getattr(method, name), most[name]) for name in most}
  return dataclasses.replace(method, **sizes)


# Names of one and the same method are tested once.
CASES = {
  name: method
  for method, name in {
    small(get_method(name)): name for name in (*OPTIONS, *PRESETS, *METHODS)
  }.items()
}
LENGTHS = [61, 96, 40]
PADDED = 96
BUDGETS = (kvjax.Tokens(1), kvjax.Tokens(20), kvjax.Retention(0.5))
LAYER = 2


def core(method):
  """The method inside its wrappers."""
  return core(method.inner) if hasattr(method, "inner") else method


def blind(method):
  """Whether it looks at positions alone."""
  return isinstance(core(method), (FullKV, Random, StreamingLLM))


def draws_per_head(method):
  method = core(method)
  if isinstance(method, Compactor):
    return method.sketch != "none"
  if isinstance(method, ProtoKV):
    hashes = method.clusters == "prototypes" and method.anchors > 0
    return hashes or method.clusters in ("lsh", "kmeans")
  return isinstance(method, Random)


def coarse(method):
  """Whether it keeps whole chunks or clusters and may leave room."""
  method = core(method)
  cut = isinstance(method, ProtoKV) and method.cut in ("skip", "none")
  return cut or isinstance(method, ChunkKV)


def must_stay(method, n, count):
  """Positions that a row of n tokens may not lose, by the papers."""
  method = core(method)
  first = last = 0
  match method:
    case SnapKV() | ProtoKV() | ChunkKV():
      last = method.window
    case StreamingLLM():
      first = method.sinks
    case Compactor():
      first, last = method.first, method.last
    case KeyDiff():
      last = int(method.recent_frac * count + 1e-9)
    case H2O():
      last = method.recent or int(method.recent_frac * count + 1e-9)
    case Tova():
      last = int(method.protect_last)
    case LagKV():
      first = method.sinks
      last = n - first
      if n >= method.sinks + 2 * method.lag:
        last = method.lag + (n - first) % method.lag
      elif method.mode == "kvpress":
        last = 0  # the rest goes by recency
  places = [*range(first), *range(max(n - last, first), n)]
  return set(places[-count:])


def layer_total(method, budget, n, count, heads):
  """Tokens that heads which share a budget keep together."""
  inner = core(method)
  by_share = isinstance(budget, kvjax.Retention)
  if not (by_share and isinstance(inner, Compactor)):
    return heads * count
  middle = n - inner.first - inner.last
  return int(heads * middle * budget.share + 0.5)


def run(method, seen, counts, together, capacity):
  cache = LayerCache.of(seen)
  allowance = Allowance(counts, capacity, together=together)
  return compress(method, LAYER, cache, seen, [allowance])[0]


compiled = functools.partial(jax.jit, static_argnums=(0, 4))(run)


def room(method, lengths, padded):
  """For every budget, what the rows keep and the slots that this takes."""
  counts = np.array(
    [[method.kept(budget, n) for n in lengths] for budget in BUDGETS], np.int32
  )
  slots = [method.capacity(budget, padded) for budget in BUDGETS]
  return counts, tuple(map(max, slots, counts.max(axis=1).tolist()))


def kept(method, seen, lengths=LENGTHS, run=compiled):
  """Positions kept with each budget, per row and head, as lists.

  All in slots for the largest budget, so that one program serves them.
  """
  counts, capacities = room(method, lengths, seen.positions.shape[1])
  heads, rows = seen.keys.shape[1], range(len(lengths))
  found = []
  for budget, own in zip(BUDGETS, counts, strict=True):
    together = np.array(
      [method.layer_together(budget, n, 3, heads)[LAYER] for n in lengths],
      np.int32,
    )
    both = jnp.asarray(own), jnp.asarray(together)
    layer = run(method, seen, *both, max(capacities))
    found.append([layer_positions(layer, row) for row in rows])
  return found


def activations(seed, **options):
  return random_activations(
    seed, LENGTHS, PADDED, heads=6, kv_heads=3, **options
  )


# Compiling takes nearly all the time: these need programs of their own.
NAMED = [name for name in CASES if name in METHODS]
DRAWING = [name for name, method in CASES.items() if draws_per_head(method)]


def rows_of(seen, rows, padded=PADDED):
  """Some of the rows, padded to another length."""

  def cut(x):
    x = np.asarray(x)[rows]
    return jnp.asarray(x[:, :padded] if x.ndim == 2 else x[:, :, :padded])

  return jax.tree.map(cut, seen)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow if name in FORMULAS else ())
    for name in CASES
  ],
)
class TestMethod:
  def test_keeps_its_budget_sorted_unique_and_protected(self, name):
    method = CASES[name]
    counts, capacities = room(method, LENGTHS, PADDED)
    for budget, capacity in zip(BUDGETS, capacities, strict=True):
      nearly = (method.kept(budget, n) for n in bucket_lengths(PADDED))
      assert capacity >= max(nearly)
    found = kept(method, activations(0))
    for budget, rows, own in zip(BUDGETS, found, counts.tolist(), strict=True):
      for heads, n, count in zip(rows, LENGTHS, own, strict=True):
        expected = n if method.keeps_all(LAYER) else count
        if method.packed:
          total = layer_total(method, budget, n, count, len(heads))
          left = total - sum(map(len, heads))
          assert left >= 0 if coarse(method) else left == 0
        for places in heads:
          if coarse(method):
            assert 1 <= len(places) <= (total if method.packed else expected)
          elif not method.packed:
            assert len(places) == expected
          assert places == sorted(set(places))
          assert set(places) <= set(range(n))
          assert must_stay(method, n, count) <= set(places)

  def test_the_choice_follows_from_the_activations(self, name):
    """Else none of these tests could fail; but for the smallest budget."""
    method = CASES[name]
    one, other = (kept(method, activations(seed)) for seed in (6, 9))
    for rows, others in zip(one[1:], other[1:], strict=True):
      for heads, other_heads in zip(rows, others, strict=True):
        same = [a == b for a, b in zip(heads, other_heads, strict=True)]
        assert same == [blind(method)] * 3

  def test_a_row_stands_alone(self, name):
    """Whatever its batch mates and its place among them."""
    method, seen, others = CASES[name], activations(1), activations(11)
    mixed = jax.tree.map(
      lambda x, other: np.stack([x[2], other[1], x[0]]), seen, others
    )
    together = kept(method, seen)
    apart = kept(method, jax.tree.map(jnp.asarray, mixed), LENGTHS[::-1])
    for rows, turned in zip(together, apart, strict=True):
      assert [turned[2], turned[0]] == [rows[0], rows[2]]

  def test_heads_are_treated_alike(self, name):
    method = CASES[name]
    if draws_per_head(method):
      pytest.skip("it draws numbers per head")
    seen = activations(3)
    order = np.array([2, 0, 1])
    query_order = np.concatenate([[2 * k, 2 * k + 1] for k in order])
    turned = dataclasses.replace(
      seen,
      queries=seen.queries[:, query_order],
      keys=seen.keys[:, order],
      values=seen.values[:, order],
      keys_unrotated=seen.keys_unrotated[:, order],
    )
    plain, permuted = kept(method, seen), kept(method, turned)
    for rows, turned_rows in zip(plain, permuted, strict=True):
      assert [[row[k] for k in order] for row in rows] == turned_rows

  def test_scores_are_float32(self, name):
    seen = activations(4, dtype="bfloat16")
    found = jax.eval_shape(
      lambda seen: CASES[name].evaluate(LAYER, LayerCache.of(seen), seen), seen
    )
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(found)}
    assert dtypes <= {jnp.dtype("float32"), jnp.dtype("int32")}

  def test_a_key_that_is_not_a_number_harms_its_own_row_only(self, name):
    """Scores that are not finite count as the lowest."""
    method = CASES[name]
    seen = activations(5)
    broken = dataclasses.replace(
      seen,
      keys=seen.keys.at[1, 0, 7, 2].set(jnp.nan),
      keys_unrotated=seen.keys_unrotated.at[1, 0, 7, 2].set(jnp.nan),
    )
    for whole, harmed in zip(
      kept(method, seen), kept(method, broken), strict=True
    ):
      assert [harmed[0], harmed[2]] == [whole[0], whole[2]]
      if not coarse(method):
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
def test_padding_changes_nothing(name):
  method, seen = CASES[name], activations(1)
  together = kept(method, seen)
  # One program for both; the row between them has no padding to lose.
  for row in (0, 2):
    alone = kept(method, rows_of(seen, [row], 62), [LENGTHS[row]])
    assert [rows[0] for rows in alone] == [rows[row] for rows in together]


# Step by step everything compiles by itself: few of them.
@pytest.mark.parametrize(
  "name",
  [
    *("h2o", "lagkv", "compactor"),
    pytest.param("protokv", marks=pytest.mark.slow),
  ],
)
def test_jit_equals_eager(name):
  method, seen = CASES[name], activations(2)
  counts, capacities = room(method, LENGTHS, PADDED)
  own = jnp.asarray(counts[1])
  jitted, eager = (
    program(method, seen, own, 3 * own, max(capacities))
    for program in (compiled, run)
  )
  for row in range(len(LENGTHS)):
    assert layer_positions(jitted, row) == layer_positions(eager, row)


@pytest.mark.parametrize("name", [n for n in NAMED if not blind(CASES[n])])
def test_a_bfloat16_cache_is_scored_as_its_float32_copy(name):
  method = CASES[name]
  narrow = activations(4, dtype="bfloat16")
  wide = jax.tree.map(
    lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, narrow
  )
  assert kept(method, narrow) == kept(method, wide)


def test_another_seed_keeps_other_tokens():
  one, two = (
    kept(get_method(f"random:seed={seed}"), activations(5)) for seed in (0, 1)
  )
  assert one != two
