"""What every eviction method keeps to, on one device and on four."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.layers import LayerCache
from kvjax.methods import (
  METHODS,
  PRESETS,
  Allowance,
  FullKV,
  ScoringMethod,
  get_method,
)
from kvjax.prompts import bucket_lengths
from kvjax.sharding import parse_mesh
from kvjax.step import compress
from kvjax.testing import (
  TinyModel,
  held_positions,
  layer_positions,
  poisoned,
  random_activations,
)

OPTIONS = [
  "random:seed=3",
  "streaming:sinks=0",
  "keydiff:anchor=pairwise",
  "keydiff:anchor=median_unit",
  "keydiff:anchor=median_raw:metric=dot",
  "keydiff:anchor=mean_raw:metric=euclid",
  "keydiff:recent_frac=0.2",
  "snapkv:group=max",
  "h2o:recent=8",
  "chunkkv:window=8:chunk=7",
  "chunkkv:window=8:scope=head",
  "pyramid/keydiff",
  "ada/keydiff",
  "ada/snapkv.kvpress:window=8",
  "adakv:alpha=0.5:normalize=true",
  "pyramid/ada/snapkv:window=4",
  "compactor.vllm:sketch_dim=6:chunk=16:leverage_chunk=20:first=2:last=3",
  "lagkv:sinks=4:lag=12",
  "lagkv:sinks=4:lag=12:value_weight=0.0:ddof=0",
  "lagkv.kvpress:sinks=3:lag=11",
  "lagkv.kvpress:lag=11:cross_scoring=true",
  "lagkv.local:lag=12",
  "lagkv.key_norm:lag=12:skip_layers=0",
  "compactor:sketch=none:chunk=16",
  "compactor:sketch=srht:value_norm=l1:pool=5",
  "compactor:solver=qr:sketch_dim=6",
  "compactor:solver=eig:center=true:leverage_chunk=20",
  "compactor.kvpress:sketch_dim=6:chunk=16",
  "protokv:prototypes=20:score=attn_mean",
  "protokv:prototypes=20:cut=skip",
  "protokv:prototypes=20:cut=none:score=qk_mean",
  "protokv:prototypes=20:cut=position:split=ceil_len:sign=literal",
  "protokv:prototypes=20:hash=hyperplane:include_self=false",
  "protokv.chunk:prototypes=10",
  "protokv.kmeans:prototypes=10:iterations=2",
]
# They keep whole chunks or clusters and may leave room.
COARSE = (
  "chunkkv",
  "protokv:prototypes=20:cut=skip",
  "protokv:prototypes=20:cut=none",
)
# A preset that is another name for the same method is tested once.
NAMES = list(
  {get_method(n): n for n in (*OPTIONS, *PRESETS, *METHODS)}.values()
)
LENGTHS = [61, 96, 40]
PADDED = 96
BUDGETS = [kvjax.Tokens(1), kvjax.Tokens(20), kvjax.Retention(0.5)]


def kept(method, seen, counts, capacity, layer=2):
  """Positions kept per row and head, as lists."""
  counts = jnp.asarray(counts, jnp.int32)
  cache = LayerCache.of(seen)
  allowance = Allowance(counts, capacity)
  (small,) = compress(method, layer, cache, seen, [allowance])
  return [layer_positions(small, row) for row in range(len(counts))]


def row_of(seen, row, padded=None):
  """One row alone, padded to another length."""
  padded = padded or seen.positions.shape[1]

  def cut(x):
    return x[row : row + 1, ..., :padded, :]

  return dataclasses.replace(
    seen,
    queries=cut(seen.queries),
    keys=cut(seen.keys),
    values=cut(seen.values),
    keys_unrotated=cut(seen.keys_unrotated),
    positions=seen.positions[row : row + 1, :padded],
  )


@pytest.mark.parametrize("name", NAMES)
class TestMethod:
  @pytest.mark.parametrize("budget", BUDGETS, ids=str)
  def test_keeps_its_budget_sorted_unique_and_protected(self, name, budget):
    method = get_method(name)
    seen = random_activations(0, LENGTHS, PADDED)
    counts = [method.kept(budget, n) for n in LENGTHS]
    capacity = method.capacity(budget, PADDED)
    nearly = (method.kept(budget, n) for n in bucket_lengths(PADDED))
    assert capacity >= max(nearly)
    capacity = max(capacity, *counts)
    guarded = np.zeros((3, 2, PADDED), bool)
    if isinstance(method, ScoringMethod):
      cache = LayerCache.of(seen)
      guarded = np.asarray(method.protected(cache, jnp.asarray(counts)))
    for row, heads in enumerate(kept(method, seen, counts, capacity)):
      whole = method.keeps_all(2) or capacity >= PADDED
      expected = LENGTHS[row] if whole else counts[row]
      if method.packed:
        assert sum(map(len, heads)) == len(heads) * expected
      for head, places in enumerate(heads):
        if method.packed and not places:
          continue
        if name.startswith(COARSE):
          assert 1 <= len(places) <= expected
        elif not method.packed:
          assert len(places) == expected
        assert places == sorted(set(places))
        assert 0 <= places[0] <= places[-1] < LENGTHS[row]
        protected = np.flatnonzero(guarded[row, head])
        must = protected[-counts[row] :]
        assert set(must.tolist()) <= set(places)

  def test_a_row_stands_alone(self, name):
    method = get_method(name)
    seen = random_activations(1, LENGTHS, PADDED)
    counts = [method.kept(kvjax.Tokens(15), n) for n in LENGTHS]
    together = kept(method, seen, counts, PADDED - 1)
    for row in range(len(LENGTHS)):
      alone = row_of(seen, row, 62 if row != 1 else PADDED)
      width = alone.positions.shape[1] - 1
      got = kept(method, alone, counts[row : row + 1], width)
      assert got[0] == together[row]

  def test_jit_equals_eager(self, name):
    method = get_method(name)
    seen = random_activations(2, LENGTHS, PADDED)
    counts = jnp.asarray([10, 20, 30], jnp.int32)

    def run(seen):
      cache = LayerCache.of(seen)
      allowance = Allowance(counts, 30)
      return compress(method, 2, cache, seen, [allowance])[0]

    eager, compiled = run(seen), jax.jit(run)(seen)
    for row in range(3):
      assert layer_positions(eager, row) == layer_positions(compiled, row)

  def test_heads_are_treated_alike(self, name):
    method = get_method(name)
    if not name.startswith(("protokv.sat", "protokv.chunk")) and (
      name.startswith(("random", "compactor", "protokv"))
    ):
      pytest.skip("it draws numbers per head")
    seen = random_activations(3, LENGTHS, PADDED, heads=6, kv_heads=3)
    order = np.array([2, 0, 1])
    query_order = np.concatenate([[2 * k, 2 * k + 1] for k in order])
    turned = dataclasses.replace(
      seen,
      queries=seen.queries[:, query_order],
      keys=seen.keys[:, order],
      values=seen.values[:, order],
      keys_unrotated=seen.keys_unrotated[:, order],
    )
    counts = [12, 12, 12]
    plain, permuted = (kept(method, x, counts, 12) for x in (seen, turned))
    assert [[row[k] for k in order] for row in plain] == permuted

  def test_bfloat16_caches_are_scored_in_float32(self, name):
    method = get_method(name)
    narrow = random_activations(4, LENGTHS, PADDED, dtype="bfloat16")
    wide = jax.tree.map(
      lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, narrow
    )
    counts = [25, 25, 25]
    assert kept(method, narrow, counts, 25) == kept(method, wide, counts, 25)
    found = method.evaluate(2, LayerCache.of(narrow), narrow)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(found)}
    assert dtypes <= {jnp.dtype("float32"), jnp.dtype("int32")}

  def test_a_key_that_is_not_a_number_harms_its_own_row_only(self, name):
    """Scores that are not finite count as the lowest."""
    method = get_method(name)
    seen = random_activations(5, LENGTHS, PADDED)
    broken = dataclasses.replace(
      seen,
      keys=seen.keys.at[1, 0, 7, 2].set(jnp.nan),
      keys_unrotated=seen.keys_unrotated.at[1, 0, 7, 2].set(jnp.nan),
    )
    counts = [method.kept(kvjax.Tokens(20), n) for n in LENGTHS]
    whole, harmed = (kept(method, x, counts, 40) for x in (seen, broken))
    assert [harmed[0], harmed[2]] == [whole[0], whole[2]]
    if not name.startswith(COARSE):
      assert sum(map(len, harmed[1])) == sum(map(len, whole[1]))
    for places in harmed[1]:
      assert places == sorted(set(places))
      assert set(places) <= set(range(LENGTHS[1]))


@pytest.mark.parametrize("name", METHODS)
class TestMethodInTheEngine:
  def test_a_whole_budget_changes_no_bit(self, name):
    model = TinyModel()
    params = model.init()
    prompts = kvjax.Prompts.of([list(range(40)), list(range(9, 60))])
    question = kvjax.Prompts.of([[1, 2, 3], [4]])
    full = kvjax.Plan(FullKV(), kvjax.Retention(1.0))
    plans = [
      kvjax.Plan(get_method(name), budget)
      for budget in (kvjax.Retention(1.0), kvjax.Tokens(64), kvjax.Tokens(999))
    ]
    (dense, *others), _ = kvjax.sweep(model, params, prompts, [full, *plans])
    decoding = kvjax.Decoding(6)
    expected = kvjax.answer(model, params, dense, question, decoding)
    for cache in others:
      jax.tree.map(np.testing.assert_array_equal, cache, dense)
    got = kvjax.answer(model, params, others[-1], question, decoding)
    np.testing.assert_array_equal(got.tokens, expected.tokens)

  def test_empty_slots_may_hold_nan(self, name):
    model = TinyModel()
    params = model.init()
    prompts = kvjax.Prompts.of([list(range(50)), list(range(20))])
    question = kvjax.Prompts.of([[5, 6], [7, 8, 9]])
    cache, _ = kvjax.prefill(
      model, params, prompts, kvjax.Plan(get_method(name), kvjax.Tokens(24))
    )
    decoding = kvjax.Decoding(6)
    clean = kvjax.answer(model, params, cache, question, decoding)
    dirty = kvjax.answer(model, params, poisoned(cache), question, decoding)
    np.testing.assert_array_equal(clean.tokens, dirty.tokens)

  def test_four_devices_equal_one(self, name):
    model = TinyModel()
    params = model.init()
    rows = [list(range(n)) for n in (50, 20, 33, 41)]
    prompts = kvjax.Prompts.of(rows)
    question = kvjax.Prompts.of([[5, 6]] * 4)

    def run():
      cache, logits = kvjax.prefill(
        model,
        params,
        prompts,
        kvjax.Plan(get_method(name), kvjax.Retention(0.3)),
      )
      answers = kvjax.answer(model, params, cache, question, kvjax.Decoding(4))
      return cache, logits, answers

    cache, logits, answers = run()
    with jax.set_mesh(parse_mesh("data:2,model:2")):
      sharded, sharded_logits, sharded_answers = run()
    layer = sharded.layers[0]
    if isinstance(layer, LayerCache):
      assert len(layer.keys.sharding.device_set) == 4
      assert layer.keys.addressable_shards[0].data.shape[:2] == (2, 1)
    else:  # pages belong to heads as they come
      assert layer.pages.keys.addressable_shards[0].data.shape[0] == 2
    for row in range(4):
      assert held_positions(cache, row) == held_positions(sharded, row)
    np.testing.assert_allclose(logits, sharded_logits, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(answers.tokens, sharded_answers.tokens)


def test_another_seed_keeps_other_tokens():
  seen = random_activations(5, LENGTHS, PADDED)
  one, two = (
    kept(get_method(f"random:seed={seed}"), seen, [20] * 3, 20)
    for seed in (0, 1)
  )
  assert one != two
