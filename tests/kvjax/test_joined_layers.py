"""Layers that choose together: meshes, strangers' methods and refusals."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choices_of_layers import (
  CHOICES,
  DIM,
  FARTHEST,
  GLOBAL,
  HEADS,
  KV_HEADS,
  MODEL,
  ONE,
  PARAMS,
  ROWS,
  assert_law,
  global_positions,
  name_of,
  prompts_of,
)
from made_up_statistics import made_up_statistics
from mesh_answers import answered, assert_same

import kvjax
from kvjax.errors import InputError
from kvjax.methods import (
  H2O,
  Chunked,
  Critical,
  KeyDiff,
  ScoringMethod,
  Traits,
  WholeChunks,
)
from kvjax.model import Geometry, LayerSpec
from kvjax.testing import TinyModel, check_method, kept_positions

RNG = np.random.default_rng(0)
FOUR = [RNG.permutation(64)[:n].tolist() for n in (50, 26, 33, 41)]
CODE = "triattention.code"
EVICTING = {"schedule": kvjax.Schedule(every=4)}
IN_BLOCKS = {"schedule": kvjax.Schedule(block=16, every=4)}


@functools.cache
def answers(choice, how, mesh=None):
  options = {"whole": {}, "evicting": EVICTING, "blocks": IN_BLOCKS}[how]
  stored = made_up_statistics(HEADS, KV_HEADS, DIM, 2)
  name = f"triattention:choice={choice}:farthest={FARTHEST}"
  plan = kvjax.get_plan(
    f"{name}:statistics={stored}", kvjax.Tokens(16), **options
  )
  return answered(TinyModel(), plan, FOUR, mesh)


@pytest.mark.filterwarnings("ignore:The .* devices of the axis 'context'")
@pytest.mark.parametrize("choice", CHOICES[1:])
@pytest.mark.parametrize(
  ("how", "mesh"),
  [
    ("whole", "data:2,model:2"),
    ("whole", "model:4"),
    ("whole", "context:2,model:2"),
    ("evicting", "data:2,model:2"),
    ("evicting", "context:4"),
    ("blocks", "model:4"),
  ],
)
def test_four_devices_keep_and_answer_what_one_does(how, mesh, choice):
  spread = answers(choice, how, mesh)
  assert_same(answers(choice, how), spread)
  assert len(jax.tree.leaves(spread.cache)[0].devices()) == 4
  for row in range(4):
    assert_law(kept_positions(spread.cache, row), choice)


@pytest.mark.parametrize("choice", CHOICES[1:])
def test_what_reads_the_kept_tokens_later_finds_the_same(choice):
  """An index, or fewer channels, of keys that wait for all layers."""
  name = name_of(choice).partition(":statistics")[0]
  plain = kvjax.get_plan(name, kvjax.Tokens(20))
  indexed = dataclasses.replace(
    plain, sparse=kvjax.get_plan("quest:dense_layers=", kvjax.Tokens(8)).sparse
  )
  narrow = kvjax.get_plan(f"think:window=5/{name}", kvjax.Tokens(20))
  prompts = kvjax.Prompts.of(ROWS)
  caches, logits = kvjax.sweep(MODEL, PARAMS, prompts, [plain, indexed, narrow])
  for row in range(3):
    kept = kept_positions(caches[0], row)
    assert kept_positions(caches[1], row) == kept
    assert kept_positions(caches[2], row) == kept
  decoding = kvjax.Decoding(4)
  for cache in caches[1:]:
    kvjax.generate(MODEL, PARAMS, cache, logits, decoding)


def test_a_prefill_that_is_compiled_whole_keeps_the_same():
  prompts, plan = kvjax.Prompts.of(ROWS), kvjax.get_plan(CODE, 0.5)

  def prefill(params):
    return kvjax.prefill(MODEL, params, prompts, plan)[0]

  cache, compiled = prefill(PARAMS), jax.jit(prefill)(PARAMS)
  for row in range(3):
    assert kept_positions(compiled, row) == kept_positions(cache, row)


@dataclasses.dataclass(frozen=True)
class Agreed(KeyDiff):
  """A stranger's method: layers agree by the mean of their scores."""

  @property
  def traits(self):
    return dataclasses.replace(super().traits, joins_layers=True)


@dataclasses.dataclass(frozen=True)
class AgreedH2O(H2O):
  """One that remembers attention."""

  @property
  def traits(self):
    return dataclasses.replace(super().traits, joins_layers=True)


@dataclasses.dataclass(frozen=True)
class Weighing(ScoringMethod):
  @property
  def traits(self):
    return Traits(joins_layers=True, weighs=True)

  def scores(self, layer, cache, activations):
    return jnp.sum(jnp.square(cache.float_keys), axis=-1)


@pytest.mark.parametrize("method", [Agreed(), AgreedH2O(), Weighing()])
def test_strangers_methods_join_by_the_mean(method):
  own = kvjax.get_plan("full", 1.0)
  plan = kvjax.Plan(method, kvjax.Tokens(11))
  (everything, cache), _ = kvjax.sweep(
    MODEL, PARAMS, kvjax.Prompts.of(ROWS), [own, plan]
  )
  for row in range(3):
    assert_law(global_positions(cache, row), "head")
  if not isinstance(method, Weighing):
    return
  for row, tokens in enumerate(ROWS):
    for head in range(KV_HEADS):
      keys = np.stack(
        [everything.layers[n].keys[row, head, : len(tokens)] for n in GLOBAL]
      ).astype(np.float64)
      mean = (keys**2).sum(axis=-1).mean(axis=0)
      best = sorted(np.argsort(-mean, kind="stable")[:11].tolist())
      assert global_positions(cache, row)[0][head] == best


@pytest.mark.parametrize("schedule", [EVICTING, IN_BLOCKS])
def test_what_a_method_remembers_is_read_of_every_layer(schedule):
  plan = kvjax.Plan(AgreedH2O(), kvjax.Tokens(12), **schedule)
  cache, logits = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  prompt = [global_positions(cache, row) for row in range(3)]
  cache = kvjax.reserve(cache, 12)
  decoding = kvjax.Decoding(9)
  after = kvjax.generate(MODEL, PARAMS, cache, logits, decoding, keep=True)
  for row in range(3):
    assert_law(prompt[row], "head")
    assert_law(global_positions(after.cache, row), "head")


def test_whole_chunks_join_as_their_method_does():
  plan = kvjax.Plan(WholeChunks(Agreed(), 4), kvjax.Tokens(12))
  cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  for row in range(3):
    assert_law(global_positions(cache, row), "model")


def refused(match):
  return pytest.raises(InputError, match=re.escape(match))


@pytest.mark.parametrize(
  ("name", "budget"),
  [
    (f"pyramid/{CODE}", 0.5),
    (CODE, kvjax.PerLayer([kvjax.Retention(0.5)] * 4)),
  ],
)
def test_layers_that_keep_the_same_tokens_have_one_budget(name, budget):
  # By default, triattention does not.
  said = "With these options, triattention keeps the same tokens in all layers"
  with refused(said) as error:
    kvjax.get_plan(name, budget)
  assert str(error.value).count(". ") == 0


def test_a_threshold_cannot_be_joined():
  @dataclasses.dataclass(frozen=True)
  class Ranged(Weighing):
    @property
    def traits(self):
      return dataclasses.replace(super().traits, score_range=(0.0, 1.0))

  with refused("keeps the same tokens in all layers"):
    kvjax.Plan(Ranged(), kvjax.Threshold(0.5))


def test_parts_of_a_prompt_cannot_be_joined():
  for make, prefix in ((Chunked, "chunked/"), (Critical, "critical/")):
    with refused(f"{prefix} selects in each layer by itself"):
      make(Weighing())


def test_layers_must_have_the_same_tokens_before_they_are_evicted_from():
  later = kvjax.get_plan(
    name_of("head"), kvjax.Tokens(9), schedule=kvjax.Schedule(every=4)
  )
  for name in ("keydiff", name_of("layer_head"), name_of("model")):
    with refused("let the same method, or full, keep the prompt") as error:
      kvjax.get_plan(name, kvjax.Tokens(20), decoding=later)
    assert str(error.value).count(". ") == 0
  # With statistics or without, it is the same method.
  for name in (name_of("head"), name_of("head").partition(":statistics")[0]):
    plan = kvjax.get_plan(name, kvjax.Tokens(20), decoding=later)
    cache, logits = kvjax.prefill(MODEL, PARAMS, prompts_of(False), plan)
    cache = kvjax.reserve(cache, 8)
    after = kvjax.generate(
      MODEL, PARAMS, cache, logits, kvjax.Decoding(4), keep=True
    )
    for row in range(3):
      kept = global_positions(after.cache, row)
      assert_law(kept, "head")
      assert len(kept[0][0]) == 9


def test_layers_that_are_joined_have_the_same_heads():
  wide = LayerSpec(2 * HEADS, KV_HEADS, DIM, weights=1)
  model = TinyModel(Geometry((ONE, wide), 4096))
  later = kvjax.Plan(
    Agreed(), kvjax.Tokens(9), schedule=kvjax.Schedule(every=4)
  )
  for plan in (
    kvjax.get_plan(CODE, 0.5),
    kvjax.get_plan("full", 1.0, decoding=later),
  ):
    with refused("differ in their heads") as error:
      kvjax.prefill(model, model.init(), kvjax.Prompts.of(ROWS), plan)
    assert str(error.value).count(". ") == 0


@pytest.mark.slow
def test_strangers_methods_pass_the_contract(registry):
  for number, kind in enumerate((Agreed, AgreedH2O)):
    kvjax.register(f"agreed_{number}_of_a_test", kind)
    check_method(kind())


def test_the_contract_finds_layers_that_are_joined_otherwise(registry):
  @dataclasses.dataclass(frozen=True)
  class Contrary(Agreed):
    def join(self, scores, cache, budget):
      return -super().join(scores, cache, budget)

  kvjax.register("contrary_of_a_test", Contrary)
  with refused("scores of a single layer must keep"):
    check_method(Contrary())
