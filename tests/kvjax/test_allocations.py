"""Allocations of somebody else's: what they must count, and when."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation import (
  Adaptive,
  Allocation,
  Floored,
  Pyramid,
  RoundedPyramid,
  StreamingHeads,
  Uniform,
  WholeLayer,
  WholeModel,
)
from kvjax.engine.preparing import prepare
from kvjax.errors import InputError
from kvjax.labels import name_of
from kvjax.methods import (
  ChunkKV,
  Compactor,
  Critical,
  Finch,
  KeyDiff,
  KeyL2Norm,
  ProtoKV,
  SnapKV,
)
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel()
PROMPTS = kvjax.Prompts.of([list(range(24))])
FOUR = kvjax.Tokens(4)


@dataclasses.dataclass(frozen=True)
class Front(Allocation):
  """One token more in the first layer."""

  @property
  def spreads_layers(self):
    return True

  def counts(self, budget, lengths, sizes):
    kept = [budget.num_kept(int(n)) for n in lengths]
    counts = np.tile(np.array(kept, np.int32), (sizes.layers, 1))
    counts[0] += 1
    return counts


@dataclasses.dataclass(frozen=True)
class Silent(Front):
  @property
  def spreads_layers(self):
    return False


@dataclasses.dataclass(frozen=True)
class Flattened(Front):
  def counts(self, budget, lengths, sizes):
    return super().counts(budget, lengths, sizes)[0]


@dataclasses.dataclass(frozen=True)
class Negative(Front):
  def counts(self, budget, lengths, sizes):
    return super().counts(budget, lengths, sizes) * -1


@dataclasses.dataclass(frozen=True)
class Even(Allocation):
  def counts(self, budget, lengths, sizes):
    return Uniform().counts(budget, lengths, sizes)

  def check_recursive(self, budget, name):
    """Accepts every budget."""


@dataclasses.dataclass(frozen=True)
class Oldest(Even):
  """Keeps the first tokens, whatever the method says."""

  def select(self, method, scores, cache, budget):
    slots = jnp.arange(budget.capacity, dtype=jnp.int32)[None, None]
    kept = jnp.where(slots < budget.per_head[..., None], slots, -1)
    heads = cache.positions.shape[:2]
    return jnp.broadcast_to(kept, (*heads, budget.capacity))


@dataclasses.dataclass(frozen=True)
class Worst(Even):
  """Keeps what the method would evict first."""

  def evaluate(self, method, layer, cache, activations):
    return -method.evaluate(layer, cache, activations)


def prefilled(allocation, budget=FOUR):
  plan = kvjax.Plan(KeyL2Norm(), budget, allocation=allocation)
  return kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan)[0]


def test_layers_keep_what_they_are_given():
  cache = prefilled(Front())
  assert cache.lengths[:, 0, 0].tolist() == [5, 4]
  assert [cache.layer(n).capacity for n in range(2)] == [5, 4]
  assert cache.nbytes < prefilled(None, kvjax.Tokens(5)).nbytes


@pytest.mark.parametrize(
  "schedule", [kvjax.Schedule(), kvjax.Schedule(block=8)]
)
def test_an_allocation_evaluates_and_selects_its_own_way(schedule):
  """Also where another plan of the sweep leaves both to the method."""
  params, prompts = MODEL.init(), PROMPTS

  def kept(*allocations):
    plans = [
      kvjax.Plan(KeyL2Norm(), FOUR, schedule=schedule, allocation=allocation)
      for allocation in allocations
    ]
    if schedule.is_whole_prompt:
      caches, _ = kvjax.sweep(MODEL, params, prompts, plans)
    else:
      caches = [kvjax.prefill(MODEL, params, prompts, p)[0] for p in plans]
    return [kept_positions(cache, 0) for cache in caches]

  plain, even, first, worst = kept(None, Even(), Oldest(), Worst())
  assert plain == even
  assert first == [[[0, 1, 2, 3]] * 2] * 2
  for best, last in zip(plain, worst, strict=True):
    for head, other in zip(best, last, strict=True):
      assert not {*head} & {*other}
  if schedule.is_whole_prompt:
    around = kept(Pyramid(Worst()))[0]
    assert {*around[1][0]} <= {*worst[1][0]}


def test_a_budget_that_is_shared_out_once_is_refused_in_blocks():
  @dataclasses.dataclass(frozen=True)
  class FrontFirst(KeyL2Norm):
    @property
    def allocation(self):
      return Front()

  kvjax.Plan(FrontFirst(), FOUR)
  for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=2)):
    for method, allocation, name in (
      (FrontFirst(), None, "FrontFirst"),
      (KeyL2Norm(), Front(), "key_norm by Front"),
    ):
      with pytest.raises(InputError, match=f"^{name} cannot spread a budget"):
        kvjax.Plan(method, FOUR, schedule=schedule, allocation=allocation)


@pytest.mark.parametrize("allocation", [Flattened(), Negative()])
def test_an_allocation_counts_tokens_by_layer_and_row(allocation):
  with pytest.raises(InputError, match="gives each of 2 layers and 1 rows"):
    prefilled(allocation)


def test_what_differs_between_layers_says_so():
  with pytest.raises(InputError, match="spreads_layers must be True"):
    prefilled(Silent())


PUBLIC = [
  kind
  for kind in vars(kvjax.allocation).values()
  if isinstance(kind, type)
  and issubclass(kind, Allocation)
  and kind is not Allocation
]


@pytest.mark.parametrize("kind", PUBLIC)
def test_every_public_allocation_keeps_the_budget(kind):
  """Any may be given to a plan by hand."""
  required = [
    field.name
    for field in dataclasses.fields(kind)
    if field.init and field.default is dataclasses.MISSING
  ]
  # LagKV's law has 16 + 6 k tokens to keep of these 64.
  made = kind(**{n: Uniform() if n == "over" else 8 for n in required})
  plan = kvjax.Plan(KeyDiff(), kvjax.Tokens(22), allocation=made)
  prompts = kvjax.Prompts.of([list(range(64))])
  prepared = prepare(plan, prompts, kvjax.Geometry.uniform(6, 4, 2, 8, 4096))
  total = int(np.sum(prepared.totals))
  assert abs(total - 6 * 2 * 22) <= (6 * 2 * 6 if "chunk" in required else 6)


@pytest.mark.parametrize(
  "method",
  [
    ChunkKV(window=4, chunk=4),
    ProtoKV(window=4),
    Critical(SnapKV(window=4)),
    Compactor(),
  ],
)
@pytest.mark.parametrize(
  "allocation", [WholeLayer(), Pyramid(WholeLayer()), WholeModel()]
)
def test_heads_share_a_budget_by_the_scores_that_select(method, allocation):
  name = name_of(method)
  with pytest.raises(InputError, match=f"; {name} ") as refused:
    kvjax.Plan(method, FOUR, allocation=allocation)
  assert str(refused.value).count(".") == 1


def test_heads_share_what_a_pyramid_gives_their_layer():
  """In either order: each layer's mean is the pyramid's."""
  method, budget = SnapKV(window=2), kvjax.Tokens(8)
  either, other = (
    kvjax.prefill(
      MODEL,
      MODEL.init(),
      PROMPTS,
      kvjax.Plan(method, budget, allocation=spread),
    )[0]
    for spread in (Adaptive(Pyramid(Uniform())), Pyramid(Adaptive(Uniform())))
  )
  assert kept_positions(either, 0) == kept_positions(other, 0)
  first, last = np.asarray(either.lengths).sum(axis=(1, 2))
  assert first > last
  assert first + last == 2 * 2 * 8


@pytest.mark.parametrize(
  "over", [Pyramid(Uniform()), WholeModel(), StreamingHeads(), Front()]
)
def test_layers_with_shares_of_their_own_have_no_pyramid(over):
  for pyramid in (Pyramid, RoundedPyramid):
    with pytest.raises(InputError, match=f"{type(over).__name__} gives layers"):
      pyramid(over)


@pytest.mark.parametrize(
  "over", [Adaptive(Uniform()), WholeLayer(), WholeModel(), StreamingHeads()]
)
def test_heads_with_shares_of_their_own_share_nothing_else(over):
  for adaptive in (Adaptive, Floored):
    with pytest.raises(InputError, match=f"{type(over).__name__} gives heads"):
      adaptive(over)


def test_chunks_have_room_for_the_question():
  rows = [list(range(n)) for n in (50, 16)]

  def prefilled(chunk, budget):
    plan = kvjax.Plan(Finch(window=8, chunk=chunk), budget)
    model = TinyModel()
    return kvjax.prefill(model, model.init(), kvjax.Prompts.of(rows), plan)[0]

  for budget in (kvjax.Retention(0.25), kvjax.Tokens(12)):
    with pytest.raises(InputError, match=r"per chunk, [34] are kept, and the"):
      prefilled(16, budget)
  cache = prefilled(25, kvjax.Retention(0.32))
  for head in kept_positions(cache, 0)[0]:
    assert set(range(42, 50)) <= set(head)


def test_what_is_uniform_is_uniform():
  with pytest.raises(InputError, match="derive what counts otherwise"):
    type("Mine", (Uniform,), {})
