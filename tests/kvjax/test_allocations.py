"""Allocations of somebody else's: what they must count, and when."""

import dataclasses

import pytest

import kvjax
from kvjax.allocation import Uniform
from kvjax.errors import InputError
from kvjax.methods import KeyL2Norm
from kvjax.testing import TinyModel


@dataclasses.dataclass(frozen=True)
class Front(Uniform):
  """More for the first layer."""

  def counts(self, budget, lengths, sizes):
    found = super().counts(budget, lengths, sizes)
    found[0] += 1
    return found


@dataclasses.dataclass(frozen=True)
class Flattened(Uniform):
  def counts(self, budget, lengths, sizes):
    return super().counts(budget, lengths, sizes)[0]


@dataclasses.dataclass(frozen=True)
class Negative(Uniform):
  def counts(self, budget, lengths, sizes):
    return super().counts(budget, lengths, sizes) * -1


def test_a_budget_that_is_shared_out_once_is_refused_in_blocks():
  @dataclasses.dataclass(frozen=True)
  class FrontFirst(KeyL2Norm):
    @property
    def allocation(self):
      return Front()

  kvjax.Plan(FrontFirst(), kvjax.Tokens(4))
  for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=2)):
    for method, allocation in ((FrontFirst(), None), (KeyL2Norm(), Front())):
      with pytest.raises(
        InputError, match="Front cannot spread a budget block"
      ):
        kvjax.Plan(method, kvjax.Tokens(4), schedule, allocation=allocation)


@pytest.mark.parametrize("allocation", [Flattened(), Negative()])
def test_an_allocation_counts_tokens_by_layer_and_row(allocation):
  model = TinyModel()
  plan = kvjax.Plan(KeyL2Norm(), kvjax.Tokens(4), allocation=allocation)
  prompts = kvjax.Prompts.of([list(range(24))])
  with pytest.raises(InputError, match="gives each of 2 layers and 1 rows"):
    kvjax.prefill(model, model.init(), prompts, plan)
