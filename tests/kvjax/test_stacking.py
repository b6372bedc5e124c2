"""Caches of unequal sizes that decode together."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache import joining as stacking
from kvjax.cache.sharding import parse_mesh, split_mesh
from kvjax.engine import generate
from kvjax.errors import InputError
from kvjax.struct import tree_bytes
from kvjax.testing import TinyModel, kept_positions

SPEC = kvjax.LayerSpec(heads=4, kv_heads=2, key_dim=8)
MODEL = TinyModel(kvjax.Geometry((SPEC,) * 3, 4096))
PARAMS = MODEL.init()
REQUEST = kvjax.RepeatRequest((3, 1, 4), (11, 12), (13, 14, 15), (9, 2))
LENGTHS = (300, 170, 233, 290)
SHARES = (0.5, 0.1, 0.25)
QUESTIONS = kvjax.Prompts.of([[5, 9], [2], [11, 4, 8], [7]])
ANSWERS = kvjax.Prompts.of([[8, 4], [1, 2, 3], [6], [33, 20]])
DECODING = kvjax.Decoding(7)


_draw = np.random.default_rng(5)
PROMPTS = kvjax.Prompts.of(
  [_draw.integers(5, 64, length).tolist() for length in LENGTHS],
  repeat_request=REQUEST,
)


@functools.cache
def caches_of(method, kv_dtype=None):
  """Caches of one method at three budgets."""
  plans = [
    kvjax.get_plan(method, kvjax.Retention(share), kv_dtype=kv_dtype)
    for share in SHARES
  ]
  return kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)[0]


def answers(cache, times=1):
  questions = QUESTIONS.repeat(times)
  return kvjax.generate(MODEL, PARAMS, cache, questions, DECODING).rows()


def nll(cache, times=1):
  """What a cache says of answers: unlike tokens, it tells all keys apart."""
  questions, expected = QUESTIONS.repeat(times), ANSWERS.repeat(times)
  return kvjax.answer_nll(MODEL, PARAMS, cache, questions, expected)


def check_joined(caches):
  """A joined cache has the tokens of each one, and reads them as each alone."""
  joined = kvjax.stack(caches)
  np.testing.assert_array_equal(
    joined.lengths, np.concatenate([cache.lengths for cache in caches], axis=1)
  )
  assert [kept_positions(joined, row) for row in range(4 * len(caches))] == [
    kept_positions(cache, row) for cache in caches for row in range(4)
  ]
  alone = np.concatenate([nll(cache) for cache in caches])
  np.testing.assert_allclose(nll(joined, len(caches)), alone, atol=1e-5)
  return joined


@pytest.mark.parametrize(
  ("method", "kv_dtype"),
  [
    ("keydiff", None),
    ("keydiff", "int8"),
    ("adakv", None),
    ("adakv", "int8"),
    ("kvzip:chunk=128", None),
    ("think:share=0.4:window=5/snapkv:window=4", None),
  ],
)
def test_budgets_of_one_method_are_joined(method, kv_dtype):
  caches = caches_of(method, kv_dtype)
  assert kvjax.group_caches(caches) == [[0], [1], [2]]
  assert kvjax.group_caches(caches, 2**30) == [[0, 1, 2]]
  joined = check_joined(caches)
  # What is not padded has the size of the largest, once for each.
  assert joined.nbytes <= len(caches) * caches[0].nbytes


@pytest.mark.parametrize(
  ("method", "axes"),
  [
    ("keydiff", "data:2,model:2"),
    ("adakv", "model:3"),
    ("kvzip:chunk=128", "data:2,model:2"),
    pytest.param("keydiff", "model:4", marks=pytest.mark.slow),
    pytest.param("adakv", "data:2,model:2", marks=pytest.mark.slow),
    pytest.param("adakv", "model:4", marks=pytest.mark.slow),
    pytest.param("kvzip:chunk=128", "model:4", marks=pytest.mark.slow),
    pytest.param("kvzip:chunk=128", "model:3", marks=pytest.mark.slow),
  ],
)
def test_budgets_are_joined_on_a_mesh(method, axes):
  alone = caches_of(method)
  with jax.set_mesh(split_mesh(parse_mesh(axes), SPEC.kv_heads)):
    caches = caches_of.__wrapped__(method)
    joined = check_joined(caches)
    expected = [kept_positions(c, row) for c in alone for row in range(4)]
    found = [kept_positions(joined, row) for row in range(4 * len(alone))]
    assert found == expected
    placed = jax.tree.map(lambda x: x.sharding.spec, joined.stacks[0])
    wanted = jax.tree.map(lambda x: x.sharding.spec, caches[0].stacks[0])
    assert jax.tree.leaves(placed) == jax.tree.leaves(wanted)


def test_pools_keep_the_order_of_their_pages():
  """A smaller pool's pages are the first ones of a larger one."""
  large, small, _ = caches_of("kvzip:chunk=128")
  grown = stacking._grow_like(small, large)
  heads = np.asarray(grown.stacks[0].pages.heads)
  used = np.moveaxis(heads, 1, 0).reshape(len(LENGTHS), -1)
  for row in used:
    count = np.sum(row >= 0)
    assert np.all(row[:count] >= 0)
    assert np.all(np.diff(row[:count]) >= 0)
  assert grown.stacks[0].most == large.stacks[0].most


def test_padding_is_limited_for_a_group():
  large, small, middle = caches_of("keydiff")
  extra = large.nbytes - small.nbytes
  caches = [small, large, small]
  assert kvjax.group_caches(caches, 2 * extra) == [[0, 1, 2]]
  assert kvjax.group_caches(caches, 2 * extra - 1) == [[0, 2], [1]]
  # Of two sizes together; what is too much for the first group has its own.
  caches, both = [small, large, middle], extra + large.nbytes - middle.nbytes
  assert kvjax.group_caches(caches, both) == [[0, 1, 2]]
  assert kvjax.group_caches(caches, both - 1) == [[0], [1, 2]]


def test_caches_grow_to_the_largest_in_each_size():
  """Pages of one, room of the other."""
  large, small, _ = caches_of("adakv")
  check_joined([large, kvjax.reserve(small, 64)])


@pytest.mark.parametrize("method", ["keydiff", "adakv", "kvzip:chunk=128"])
def test_joining_needs_no_memory_besides_the_result(method):
  check_memory_of_joining(caches_of(method) * 4)


def check_memory_of_joining(caches):
  joined = kvjax.stack(caches)
  for cache in caches[:3]:
    write = stacking._write.lower(joined, cache, np.int32(1)).compile()
    memory = write.memory_analysis()
    # All but the pointers to the results.
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 200
    assert memory.temp_size_in_bytes == 0


def test_a_cache_of_each_size_compiles_once():
  jax.clear_caches()
  caches = caches_of("keydiff")
  kvjax.stack(caches * 7)
  assert stacking._write._cache_size() == len(caches) == 3


@functools.cache
def caches_of_layers(kv_dtype=None):
  """The second cache's first and last layer are of one size, its middle not."""
  sizes = kvjax.PerLayer([kvjax.Tokens(90), kvjax.Tokens(20), kvjax.Tokens(90)])
  plans = [
    kvjax.get_plan("keydiff", budget, kv_dtype=kv_dtype)
    for budget in (kvjax.Tokens(100), sizes, kvjax.Tokens(30))
  ]
  return kvjax.sweep(MODEL, PARAMS, PROMPTS, plans)[0]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_layers_of_other_sizes_join_where_layers_share_a_stack(kv_dtype):
  caches = caches_of_layers(kv_dtype)
  assert caches[1].order == (0, 1, 0)
  assert kvjax.group_caches(caches) == [[0], [1], [2]]
  assert kvjax.group_caches(caches, 2**30) == [[0, 1, 2]]
  joined = check_joined(caches)
  assert joined.order == (0, 0, 0)
  check_memory_of_joining(caches)
  assert check_joined([caches[1], caches[0]]).order == (0, 0, 0)
  # A larger layer of the second cache would not fit.
  assert kvjax.group_caches(caches[1:], 2**30) == [[0], [1]]
  with pytest.raises(InputError, match="fit the stacks of the largest"):
    kvjax.stack(caches[1:])


def test_slots_that_layers_of_other_sizes_lack_are_padding():
  caches = caches_of_layers()
  slot = 4 * SPEC.kv_heads * (2 * 4 * SPEC.key_dim + 4)
  padding = (10 + 80 + 10) * slot
  assert kvjax.group_caches(caches[:2], padding) == [[0, 1]]
  assert kvjax.group_caches(caches[:2], padding - 1) == [[0], [1]]


def test_layers_of_other_sizes_join_on_a_mesh():
  with jax.set_mesh(split_mesh(parse_mesh("data:2,model:2"), SPEC.kv_heads)):
    joined = check_joined(caches_of_layers.__wrapped__())
    assert joined.order == (0, 0, 0)
  alone = caches_of_layers()
  expected = [kept_positions(cache, row) for cache in alone for row in range(4)]
  assert [kept_positions(joined, row) for row in range(12)] == expected


def test_layers_of_other_sizes_join_beside_windows():
  window = dataclasses.replace(SPEC, window=24)
  model = TinyModel(kvjax.Geometry((SPEC, window, SPEC), 4096))
  params = model.init()
  sizes = kvjax.PerLayer([kvjax.Tokens(size) for size in (30, 30, 9)])
  plans = [
    kvjax.get_plan("keydiff", size) for size in (kvjax.Tokens(40), sizes)
  ]
  caches, _ = kvjax.sweep(model, params, PROMPTS, plans)
  assert [cache.order for cache in caches] == [(0, 1, 0), (0, 1, 2)]
  joined = kvjax.stack(caches)
  assert joined.order == (0, 1, 0)
  alone = [
    kvjax.answer_nll(model, params, cache, QUESTIONS, ANSWERS)
    for cache in caches
  ]
  both = kvjax.answer_nll(
    model, params, joined, QUESTIONS.repeat(2), ANSWERS.repeat(2)
  )
  np.testing.assert_allclose(both, np.concatenate(alone), atol=1e-5)


def test_caches_of_models_of_other_depths_are_not_joined():
  deeper = TinyModel(kvjax.Geometry((SPEC,) * 4, 4096))
  # Its last layer has no cache.
  local = dataclasses.replace(SPEC, cache=False, weights=1)
  partly = TinyModel(kvjax.Geometry((SPEC,) * 3 + (local,), 4096))
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(90))
  foreign = [
    kvjax.prefill(model, model.init(), PROMPTS, plan)[0]
    for model in (deeper, partly)
  ]
  caches = [caches_of("keydiff")[0], *foreign]
  assert kvjax.group_caches(caches, 2**30) == [[0], [1], [2]]
  for pair in itertools.permutations(caches, 2):
    with pytest.raises(InputError, match="of the same kinds"):
      kvjax.stack(pair)


def test_a_program_may_stack():
  caches = caches_of("keydiff")[:2]
  within = jax.jit(lambda *caches: kvjax.stack(caches))(*caches)
  jax.tree.map(np.testing.assert_array_equal, within, kvjax.stack(caches))


def test_windows_and_evicting_caches_are_joined():
  """Rings never grow; a cache that evicts while decoding has its own plan."""
  window = dataclasses.replace(SPEC, window=24)
  model = TinyModel(kvjax.Geometry((SPEC, window, SPEC), 4096))
  params, prompts = model.init(), kvjax.Prompts.of([[*range(5, 60)]] * 4)
  plans = [kvjax.get_plan("keydiff", kvjax.Retention(s)) for s in (0.5, 0.2)]
  every = kvjax.Schedule(every=4)
  evicting = [
    kvjax.get_plan("keydiff", kvjax.Tokens(n), schedule=every) for n in (9, 8)
  ]
  caches, _ = kvjax.sweep(model, params, prompts, plans + evicting)
  assert kvjax.group_caches(caches, 2**30) == [[0, 1], [2], [3]]
  alone = [
    kvjax.answer_nll(model, params, cache, QUESTIONS, ANSWERS)
    for cache in caches[:2]
  ]
  both = kvjax.answer_nll(
    model,
    params,
    kvjax.stack(caches[:2]),
    QUESTIONS.repeat(2),
    ANSWERS.repeat(2),
  )
  np.testing.assert_allclose(both, np.concatenate(alone), atol=1e-5)


def test_caches_of_other_kinds_are_not_joined():
  caches = [
    caches_of("keydiff")[0],
    caches_of("adakv")[1],
    caches_of("kvzip:chunk=128")[2],
  ]
  assert kvjax.group_caches(caches, 2**30) == [[0], [1], [2]]
  with pytest.raises(InputError, match="of the same kinds"):
    kvjax.stack(caches[:2])


def test_generate_joins_what_the_weights_outweigh():
  caches = caches_of("keydiff")
  together = kvjax.generate(MODEL, PARAMS, caches, QUESTIONS, DECODING)
  assert [each.rows() for each in together] == [answers(c) for c in caches]
  # Caches that are kept stay as small as they would be alone.
  roomy = [kvjax.reserve(cache, 128) for cache in caches]
  kept = kvjax.generate(MODEL, PARAMS, roomy, QUESTIONS, DECODING, keep=True)
  assert [turn.rows() for turn in kept] == [answers(c) for c in caches]
  for turn, cache in zip(kept, roomy, strict=True):
    assert tree_bytes(turn.cache) == cache.nbytes


@pytest.mark.parametrize(
  "method", ["keydiff", "adakv:window=8", "kvzip:chunk=64", "quest:page=4"]
)
def test_a_joined_cache_is_used_up(method, monkeypatch):
  """It has room from the first, so that no program copies it."""
  caches = caches_of(method)
  joined = []

  def listen(caches, tokens):
    joined.append(stacking.stack_with_room(caches, tokens))
    return joined[-1]

  monkeypatch.setattr(generate, "stack_with_room", listen)
  together = kvjax.generate(MODEL, PARAMS, caches, QUESTIONS, DECODING)
  for cache, answer in zip(caches, together, strict=True):
    assert answer.rows() == answers(cache)
    assert answer.cache is None
  for group in stacking.group_caches(caches, tree_bytes(PARAMS)):
    used = joined.pop(0)
    leaves = jax.tree.leaves(used.stacks)
    assert any(leaf.is_deleted() for leaf in leaves) == (len(group) > 1)
  assert not joined
