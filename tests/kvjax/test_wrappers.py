"""Names before names, budgets per layer, and another method while decoding."""

import dataclasses
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation import Floored, RoundedPyramid, Sizes, Uniform
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.methods import (
  Chunked,
  Critical,
  KeyDiff,
  LayerBudget,
  Rerotated,
  SnapKV,
  WholeChunks,
)
from kvjax.registry.names import get_recipe
from kvjax.registry.wrappers import WRAPPERS
from kvjax.testing import (
  TinyModel,
  check_method,
  kept_positions,
  random_activations,
)

PAGE = pathlib.Path(__file__).parents[2] / "docs/methods/prefixes.md"
MODEL = TinyModel()
PARAMS = MODEL.init()
LAYERS = MODEL.geometry.num_layers
ROWS = [
  np.random.default_rng(n).integers(0, 64, n).tolist() for n in (61, 40, 17)
]
PROMPTS = kvjax.Prompts.of(ROWS)
LATER = kvjax.get_plan(
  "h2o", kvjax.Tokens(12), schedule=kvjax.Schedule(every=4)
)


def test_the_page_lists_all_prefixes():
  text = PAGE.read_text(encoding="utf-8")
  rows = re.findall(r"^\| `([a-z.]+)/` +\| (.*?) +\|$", text, re.MULTILINE)
  assert dict(rows) == {name: made.summary for name, made in WRAPPERS.items()}


@pytest.mark.parametrize(
  ("one", "other"),
  [
    ("pyramid:beta=10/keydiff", "pyramid/keydiff:beta=10"),
    ("ada/snapkv:alpha=0", "ada:alpha=0/snapkv"),
    ("pyramid:beta=3/ada:alpha=0.5/snapkv",
     "pyramid/ada/snapkv:alpha=0.5:beta=3"),
    ("chunked:length=32/keydiff:anchor=pairwise",
     "chunked/keydiff:length=32:anchor=pairwise"),
    ("adakv.kvpress:alpha=0.5", "ada.kvpress/snapkv.kvpress:alpha=0.5"),
    ("pyramidkv.kvpress:window=8", "pyramid.kvpress/snapkv.kvpress:window=8"),
    ("chunkkv.kvpress:chunk=9", "chunkkv.kvpress/snapkv.kvpress:chunk=9"),
  ],
)  # fmt: skip
def test_options_follow_their_own_name_or_the_last(one, other):
  assert get_recipe(one) == get_recipe(other)


def test_an_option_of_two_parts_is_the_methods():
  method = get_recipe("chunkkv.kvpress:chunk=10/noncausal:chunk=24").method
  assert (method.chunk, method.over.chunk) == (10, 24)
  both = get_recipe("chunkkv.kvpress/noncausal:chunk=24").method
  assert (both.chunk, both.over.chunk) == (20, 24)


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("rerotat/keydiff", "did you mean rerotate"),
    ("chunked:window=3/snapkv", "'chunked' has no option 'window'"),
    ("chunked:length=0/keydiff", "length must be 1 or more"),
    ("rerotate/ada/keydiff", "write it behind pyramid/ and ada/"),
    ("think/adakv.kvpress", "and adakv.kvpress spreads it; write it behind"),
    ("ada/ada.kvpress/keydiff", "ada stands 2 times"),
    ("ada/pyramid/keydiff", "its layers have their shares"),
    ("ada.kvpress/adakv", "unequal shares already"),
    ("ada/criticaladakv", "The heads of criticaladakv have unequal shares"),
    ("ada/duoattention", "The budget of duoattention cannot be spread"),
    ("ada/finch", "The budget of finch cannot be spread unevenly"),
    ("ada/rerotate/keydiff", "The budget of rerotate/keydiff cannot be spread"),
    ("rerotate/chunkkv", "it keeps whole chunks"),
    ("rerotate/key_norm.lagkv", "it leaves layers whole"),
    ("rerotate/compactor.vllm", "its heads share a budget"),
    ("chunkkv.kvpress/protokv", "gives no scores to single tokens"),
    ("chunkkv.kvpress/compactor.vllm", "share a budget"),
    ("chunked/compactor.vllm", "share a budget"),
    ("chunked/lagkv", "lagkv keeps its own share of the parts of a prompt"),
    ("chunkkv.kvpress/lagkv", "lagkv keeps its own share of the parts"),
  ],
)
def test_prefixes_that_do_not_fit_are_explained(name, said):
  with pytest.raises(InputError, match=re.escape(said)):
    get_recipe(name)


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("ada/rerotate/keydiff", "the same number of tokens"),
    ("pyramid/chunked/keydiff", "every chunk has its own share"),
    ("ada/chunkkv.kvpress", "Heads compete"),
  ],
)
def test_budgets_that_cannot_be_spread_are_explained(name, said):
  with pytest.raises(InputError, match=re.escape(said)):
    kvjax.get_plan(name, kvjax.Retention(0.5))


def test_presets_of_kvpress_round_as_it_does():
  budget = kvjax.get_plan("keydiff.kvpress", kvjax.Retention(0.1)).budget
  assert budget == kvjax.Retention(0.1, rounding="kvpress")
  for length in range(1, 400):
    for percent in range(0, 100, 5):
      ratio = percent / 100
      share = kvjax.Retention(1 - ratio, rounding="kvpress")
      assert share.num_kept(length) == max(1, int(length * (1 - ratio)))
  # Nearer to what was meant than to what is stored: 60 * (1 - 0.9) < 6.
  assert kvjax.Retention(0.1, rounding="kvpress").num_kept(60) == 5
  assert (
    kvjax.get_plan("keydiff", kvjax.Retention(0.1)).budget.num_kept(60) == 6
  )
  for name in ("ada.kvpress/keydiff", "rerotate/keydiff.kvpress"):
    assert kvjax.get_plan(name, budget).budget.rounding == "kvpress"
  assert kvjax.get_plan("keydiff.kvpress", kvjax.Tokens(5)).budget == (
    kvjax.Tokens(5)
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "method",
  [
    Rerotated(KeyDiff()),
    Chunked(SnapKV(window=3), 16),
    Chunked(KeyDiff(), 16),
    WholeChunks(SnapKV(window=5), 4),
    WholeChunks(KeyDiff(), 64),
  ],
  ids=str,
)
def test_methods_around_methods_keep_the_contract(method):
  check_method(method)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.2, 0.6, 1.0])
def test_a_floor_equals_a_loop(alpha):
  """As kvpress says it: the safe slots get the highest score of all."""
  lengths, padded, window = [61, 30], 64, 4
  seen = random_activations(1, lengths, padded, heads=6, kv_heads=3)
  method, allocation = SnapKV(window=window), Floored(Uniform(), alpha)
  cache = LayerCache.of(seen)
  scores = allocation.evaluate(method, jnp.int32(0), cache, seen)
  for counts in ([20, 11], [7, 4], [40, 29]):
    budget = LayerBudget(jnp.asarray(counts), max(counts))
    slots = np.asarray(allocation.select(method, scores, cache, budget))
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
      own = np.array(scores[0][row, :, :length], np.float64)
      own[:, -window:] = own.max() + 1
      safe = int(count * alpha + 1e-9)
      safe = max(1, safe) if alpha else 0
      for head in own:
        head[np.argsort(-head, kind="stable")[:safe]] = np.inf
      best = np.argsort(-own.T.ravel(), kind="stable")[: 3 * count]
      expected = sorted((int(n) % 3, int(n) // 3) for n in best)
      found = [
        (head, int(slot))
        for head, listed in enumerate(slots[row])
        for slot in listed
        if slot >= 0
      ]
      assert found == expected


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_the_first_stage_of_a_head_has_its_floor(alpha):
  """As CriticalAdaKVPress says it: safe slots get the highest score of all."""
  length, window, count = 61, 4, 20
  seen = random_activations(1, [length], length, heads=6, kv_heads=3)
  width = seen.values.shape[-1]
  projection = np.random.default_rng(2).standard_normal((6, width, 24))
  seen = dataclasses.replace(
    seen, output_projection=jnp.asarray(projection, jnp.float32)
  )
  method = Critical(SnapKV(window=window))
  allocation, cache = Floored(Uniform(), alpha), LayerCache.of(seen)
  votes, own = allocation.evaluate(method, jnp.int32(0), cache, seen)
  # One head wins nearly all: its votes are far above those of the others.
  votes = votes * jnp.array([[[100.0], [1.0], [1.0]]])
  budget = LayerBudget(jnp.array([count]), count)
  found = allocation.select(method, (votes, own), cache, budget)
  ranked = np.array(votes[0], np.float64)
  ranked[:, -window:] = ranked.max() + 1
  best = np.argsort(-ranked, axis=-1, kind="stable")
  safe = int(count * alpha + 1e-9)
  np.put_along_axis(ranked, best[:, :safe], np.inf, axis=-1)
  winners = np.argsort(-ranked.ravel(), kind="stable")[: 3 * count]
  budgets = np.bincount(winners // length, minlength=3)
  assert budgets.max() > 1.05 * budgets.min()
  second = np.asarray((own.scores + method.epsilon) * own.norms)[0]
  for head, share in enumerate(budgets):
    first = max(safe, share // 2)
    scores = second[head].astype(np.float64)
    scores[best[head, :first]] = np.inf
    scores[-window:] = np.inf
    expected = np.argsort(-scores, kind="stable")[:share]
    listed = np.asarray(found)[0, head]
    assert listed[listed >= 0].tolist() == sorted(expected.tolist())


def test_a_rounded_pyramid_is_within_half_a_token():
  pyramid = RoundedPyramid(Uniform(), beta=4.0)
  budget = kvjax.Retention(0.37, rounding="kvpress")
  lengths = np.arange(1, 400)
  counts = pyramid.counts(budget, lengths, Sizes((2,) * 7, 8))
  assert counts.min() >= 1
  assert (counts <= lengths).all()
  assert (np.diff(counts, axis=0) <= 0).all()
  uneven = counts[0] > counts[-1]
  assert uneven.any()
  assert not uneven.all()
  off = np.abs(counts.mean(axis=0) - 0.37 * lengths)
  assert off[lengths > 2].max() <= 0.5 + 1e-9
  alone = pyramid.counts(budget, lengths, Sizes((2,), 8))[0]
  assert np.abs(alone - 0.37 * lengths)[lengths > 2].max() <= 0.5 + 1e-9
  everything = pyramid.counts(kvjax.Retention(1.0), lengths, Sizes((2,) * 7, 8))
  assert (everything == lengths).all()


@pytest.mark.parametrize("budget", [kvjax.Tokens(5), kvjax.Retention(0.1)])
def test_a_rounded_pyramid_leaves_no_layer_empty(budget):
  pyramid = RoundedPyramid(Uniform())
  counts = pyramid.counts(budget, np.arange(1, 200), Sizes((2,) * 4))
  assert counts.min() >= 1


def test_a_budget_per_layer_keeps_what_each_keeps():
  shares = [kvjax.Retention(0.5), kvjax.Tokens(7), kvjax.Retention(1.0)]
  shares = (shares * LAYERS)[:LAYERS]
  plans = [kvjax.get_plan("keydiff", share) for share in shares]
  mixed = kvjax.get_plan("keydiff", kvjax.PerLayer(shares))
  (cache, *alone), _ = kvjax.sweep(MODEL, PARAMS, PROMPTS, [mixed, *plans])
  for row in range(len(ROWS)):
    kept = kept_positions(cache, row)
    for layer in range(LAYERS):
      assert kept[layer] == kept_positions(alone[layer], row)[layer]


@pytest.mark.parametrize(
  ("make", "said"),
  [
    (lambda: kvjax.PerLayer([]), "one for each layer"),
    (lambda: per_layer("pyramidkv"), "spreads one over the layers itself"),
    (lambda: per_layer("rerotate/keydiff"), "the same number of tokens"),
    (
      lambda: per_layer("keydiff", schedule=kvjax.Schedule(every=4)),
      "all layers have the same",
    ),
    (lambda: per_layer("quest"), "as many keys in all layers"),
    (
      lambda: kvjax.prefill(MODEL, PARAMS, PROMPTS, per_layer("keydiff", 9)),
      f"lists 9 layers and the model has {LAYERS}",
    ),
  ],
)
def test_budgets_per_layer_that_do_not_fit_are_explained(make, said):
  with pytest.raises(InputError, match=re.escape(said)):
    make()


def per_layer(name, layers=LAYERS, **options):
  budget = kvjax.PerLayer([kvjax.Retention(0.5)] * layers)
  return kvjax.get_plan(name, budget, **options)


def after_decoding(plan, prompts, tokens=10):
  cache, logits = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  cache = kvjax.reserve(cache, 48)
  return kvjax.generate(
    MODEL, PARAMS, cache, logits, kvjax.Decoding(tokens), keep=True
  )


def test_the_same_method_while_decoding_is_one_schedule():
  twice = kvjax.get_plan("h2o", kvjax.Tokens(12), decoding=LATER)
  one, other = (after_decoding(plan, PROMPTS) for plan in (LATER, twice))
  assert one.rows() == other.rows()
  assert one.cache.plan == other.cache.plan == LATER
  for row in range(len(ROWS)):
    assert kept_positions(one.cache, row) == kept_positions(other.cache, row)


@pytest.mark.slow
def test_a_method_for_whole_prompts_may_precede_another(tmp_path):
  """In a batch as alone, also when the cache has been saved."""
  plan = kvjax.get_plan(
    "pyramid/chunkkv:window=4:chunk=3", kvjax.Tokens(16), decoding=LATER
  )
  cache, logits = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  kvjax.save_cache(cache, tmp_path / "cache", model=MODEL, model_id="tiny")
  loaded = kvjax.load_cache(tmp_path / "cache", model=MODEL, model_id="tiny")
  assert loaded.plan == LATER
  after = kvjax.generate(
    MODEL,
    PARAMS,
    kvjax.reserve(loaded, 48),
    logits,
    kvjax.Decoding(10),
    keep=True,
  )
  alone = after_decoding(plan, kvjax.Prompts.of(ROWS[1:2]))
  assert after.rows()[1] == alone.rows()[0]
  assert kept_positions(after.cache, 1) == kept_positions(alone.cache, 0)
  # Of 10 tokens, 2 follow the last eviction of at most 12.
  assert int(max(n.max() for n in map(jnp.asarray, lengths(after)))) <= 14


def lengths(generated):
  return [layer.lengths for layer in generated.cache.layers]


@pytest.mark.parametrize(
  ("options", "said"),
  [
    (dict(name="adakv"), "different numbers of tokens"),
    (dict(name="rerotate/keydiff"), "renumber"),
    (dict(name="quest/keydiff@8"), "an index"),
    (dict(name="keydiff", kv_dtype="int8"), "eight bits"),
    (dict(name="keydiff", per_query_head=True), "same per_query_head"),
    (dict(name="keydiff", schedule=kvjax.Schedule(block=8)), "whole prompt"),
  ],
)
def test_methods_that_cannot_follow_each_other_are_explained(options, said):
  with pytest.raises(InputError, match=f"h2o cannot evict .*{said}"):
    kvjax.get_plan(budget=kvjax.Tokens(8), decoding=LATER, **options)


def test_a_plan_that_does_not_decode_cannot_follow():
  later = kvjax.get_plan("keydiff", kvjax.Tokens(8))
  with pytest.raises(InputError, match="its schedule must be"):
    kvjax.get_plan("snapkv", kvjax.Tokens(8), decoding=later)


def test_a_chunk_cannot_protect_more_than_it_keeps():
  masks = [[n < 6 for n in range(len(row))] for row in ROWS]
  prompts = kvjax.Prompts.of(ROWS, protected=masks)
  plan = kvjax.get_plan("chunked:length=10/keydiff", kvjax.Retention(0.5))
  with pytest.raises(InputError, match="6 tokens of a chunk of 10"):
    kvjax.prefill(MODEL, PARAMS, prompts, plan)
