"""Allocations of somebody else's: what they must count, and when."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.allocation import Allocation, Uniform
from kvjax.errors import InputError
from kvjax.methods import KeyL2Norm
from kvjax.testing import TinyModel

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


def prefilled(allocation, budget=FOUR):
  plan = kvjax.Plan(KeyL2Norm(), budget, allocation=allocation)
  return kvjax.prefill(MODEL, MODEL.init(), PROMPTS, plan)[0]


def test_layers_keep_what_they_are_given():
  cache = prefilled(Front())
  assert cache.lengths[:, 0, 0].tolist() == [5, 4]
  assert [cache.layer(n).capacity for n in range(2)] == [5, 4]
  assert cache.nbytes < prefilled(None, kvjax.Tokens(5)).nbytes


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


def test_what_is_uniform_is_uniform():
  with pytest.raises(InputError, match="derive what counts otherwise"):
    type("Mine", (Uniform,), {})
