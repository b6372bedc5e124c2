"""Eviction block by block, and what no schedule allows."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache.sharding import parse_mesh
from kvjax.engine import blocks
from kvjax.engine.compression_plan import Plan
from kvjax.engine.preparing import prepare_repeated
from kvjax.errors import InputError
from kvjax.methods import FullKV
from kvjax.registry.names import get_method
from kvjax.testing import TinyModel, kept_positions

# Half the time to compile, where one layer shows it all.
MODEL = TinyModel(kvjax.Geometry.uniform(1, 4, 2, 8, 4096))
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
# No token twice: equal keys would tie, and ties fall as rounding falls.
ROWS = [RNG.permutation(64)[:n].tolist() for n in (61, 40, 17)]
PROMPTS = kvjax.Prompts.of(ROWS)
ASKED = [[5, 3], [8], [9, 7, 9]]
QUESTIONS = kvjax.Prompts.of(ASKED, 8)
ALL = kvjax.Retention(1.0)

BUDGET = kvjax.Tokens(12)


def budget_of(name):
  return kvjax.Retention(0.4) if name.startswith("lagkv") else BUDGET


def prefill(name, schedule, rows=ROWS, model=MODEL, params=PARAMS):
  return kvjax.prefill(
    model,
    params,
    kvjax.Prompts.of(rows, 64),
    Plan(get_method(name), budget_of(name), schedule=schedule),
  )


# What each remembers, or does not, is of another kind.
FEW = [
  "h2o",
  "snapkv:window=4",
  "keydiff",
  "lagkv:sinks=2:lag=5",
  pytest.param("tova", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_one_block_is_the_whole_prompt(name):
  whole, logits = prefill(name, kvjax.Schedule())
  block, own = prefill(name, kvjax.Schedule(block=64))
  for row in range(3):
    assert kept_positions(block, row) == kept_positions(whole, row)
  np.testing.assert_allclose(own, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_a_budget_that_holds_everything_changes_nothing(name):
  method = get_method(name)
  schedule = kvjax.Schedule(block=8, every=1)
  budget = ALL if name.startswith("lagkv") else kvjax.Tokens(200)
  dense, logits = kvjax.prefill(MODEL, PARAMS, PROMPTS, Plan(FullKV(), ALL))
  cache, own = kvjax.prefill(
    MODEL, PARAMS, PROMPTS, Plan(method, budget, schedule=schedule)
  )
  for row in range(3):
    assert kept_positions(cache, row) == kept_positions(dense, row)
  np.testing.assert_allclose(own, logits, rtol=0, atol=1e-5)
  decoding = kvjax.Decoding(20)
  expected = kvjax.generate(MODEL, PARAMS, dense, QUESTIONS, decoding)
  got = kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, decoding)
  np.testing.assert_array_equal(got.tokens, expected.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["h2o", "snapkv:window=4", "lagkv:sinks=2:lag=5"]
)
def test_four_devices_equal_one(name):
  schedule = kvjax.Schedule(block=8, every=2)
  rows = [*ROWS, ROWS[1][:30]]
  one, logits = prefill(name, schedule, rows)
  with jax.set_mesh(parse_mesh("data:2,model:2")):
    four, own = prefill(name, schedule, rows)
  for row in range(4):
    assert kept_positions(one, row) == kept_positions(four, row)
  np.testing.assert_allclose(own, logits, rtol=0, atol=1e-5)


def test_normalized_attention_evicts_repeatedly():
  plan = kvjax.get_plan(
    "h2o.kvpress", kvjax.Tokens(20), schedule=kvjax.Schedule(block=8, every=1)
  )
  cache, _ = kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)
  assert int(cache.lengths.max()) == 20


@pytest.mark.parametrize(
  ("name", "budget", "beside"),
  [
    ("keydiff", kvjax.Tokens(128), 0.35),
    ("h2o", kvjax.Tokens(128), 1.35),
    ("snapkv:window=16", kvjax.Tokens(128), 0.35),
    ("lagkv:sinks=4:lag=32", kvjax.Retention(0.1), 0.2),
  ],
)
def test_memory_in_blocks_is_budget_and_block(name, budget, beside):
  """What the compiled program holds at its peak, to a twentieth.

  A loop's carry is updated in place: every layer's budget and block once, with
  what the method remembers. Beside it there is the work of one layer, attention
  and then eviction in the same memory: twice the logits of the block, which
  become weights, and `beside` as many keys and values as the layer holds; most
  for the masses of H2O. For a budget in tokens nothing depends on the length of
  the prompt.
  """
  layers, block, width = 2, 32, 2048
  geometry = kvjax.Geometry.uniform(layers, 4, 2, 32, 2**17)
  spec = geometry.layers[0]
  model = dataclasses.replace(MODEL, geometry=geometry)
  params = jax.eval_shape(model.init)
  plan = Plan(get_method(name), budget, schedule=kvjax.Schedule(block=block))

  def compiled(length):
    prepared = prepare_repeated(plan, np.array([length]), length, geometry)
    lowered = blocks._prefill_blocks.lower(
      model,
      params,
      jax.ShapeDtypeStruct((1, length), "int32"),
      jax.ShapeDtypeStruct((1,), "int32"),
      prepared,
      None,
    )
    memory = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.output_size_in_bytes, prepared

  used, output, prepared = compiled(width)
  most = prepared.capacity
  slot = spec.kv_heads * (2 * 4 * spec.key_dim + 4)
  assert output < 1.1 * layers * most * slot
  remembered = {
    "h2o": spec.kv_heads * 4 * (most + block),
    "snapkv:window=16": spec.heads * 4 * 16 * spec.key_dim,
  }
  carry = layers * ((most + block) * slot + remembered.get(name, 0))
  logits = spec.heads * block * (most + block) * 4
  expected = carry + beside * (most + block) * slot + 2 * logits
  assert 0.95 * expected < used < 1.05 * expected
  if name == "h2o":
    assert compiled(32 * width)[0] < 1.05 * expected


@pytest.mark.parametrize(
  ("name", "budget", "sentence"),
  [
    ("compactor", BUDGET, "compactor cannot evict block by block or while"),
    ("protokv", BUDGET, "protokv cannot evict block by block or while"),
    ("chunkkv", BUDGET, "chunks are those of a whole prompt"),
    ("pyramidkv", BUDGET, "it shares it out once, when the prompt is known"),
    (
      "lagkv",
      BUDGET,
      "give a retention in place of 12 tokens, or choose mode=kvpress",
    ),
  ],
)
def test_what_a_paper_does_not_define_is_refused(name, budget, sentence):
  for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=1)):
    with pytest.raises(InputError, match=sentence) as caught:
      kvjax.get_plan(name, budget, schedule=schedule)
    assert str(caught.value).endswith(".")


def test_a_schedule_that_makes_no_sense_is_refused():
  with pytest.raises(
    InputError, match="block must be a whole number, 1 or more; 0"
  ):
    kvjax.Schedule(block=0)
  with pytest.raises(InputError, match="every must be a whole"):
    kvjax.Schedule(every=-1)
  with pytest.raises(InputError, match="give block too"):
    kvjax.Schedule(first=8)


def test_a_sweep_shares_no_pass_with_blocks():
  plan = Plan(get_method("keydiff"), BUDGET, schedule=kvjax.Schedule(block=8))
  with pytest.raises(
    InputError, match=r"plan of blocks of 8 to kvjax\.prefill"
  ):
    kvjax.sweep(MODEL, PARAMS, PROMPTS, [plan])


@pytest.mark.slow
def test_rows_of_unequal_budgets_pool_their_own_neighbors():
  """The shorter row has gaps where the longer one has tokens."""
  method = get_method("snapkv:window=2:kernel=5")
  schedule = kvjax.Schedule(block=8)
  budget = kvjax.Retention(0.4)

  def run(rows):
    prompts = kvjax.Prompts.of(rows, 64)
    return kvjax.prefill(
      MODEL, PARAMS, prompts, Plan(method, budget, schedule=schedule)
    )[0]

  together = run(ROWS)
  for row, ids in enumerate(ROWS):
    assert kept_positions(run([ids]), 0) == kept_positions(together, row)
