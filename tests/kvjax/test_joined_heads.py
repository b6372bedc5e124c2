"""Methods whose heads keep the same tokens, by what all of them hold."""

import dataclasses

import jax.numpy as jnp
import pytest
from contract_cases import CASES

import kvjax
from kvjax.methods import HeadwiseMethod, Traits
from kvjax.registry.registry import METHODS
from kvjax.testing import check_method, contract
from kvjax.testing.subject import Subject


@dataclasses.dataclass(frozen=True)
class Apart(HeadwiseMethod):
  """Each head for itself, whatever it says."""

  joins: bool = True

  @property
  def traits(self):
    return Traits(joins_heads=self.joins)

  def score_head(self, head):
    return -jnp.sum(head.keys**2, axis=-1)


@dataclasses.dataclass(frozen=True)
class Together(Apart):
  """All heads by their mean score, without saying so."""

  joins: bool = False

  def scores(self, layer, cache, activations):
    scores = super().scores(layer, cache, activations)
    return jnp.broadcast_to(jnp.mean(scores, 1, keepdims=True), scores.shape)


@pytest.mark.parametrize(
  ("method", "said"),
  [
    (Together(), "must say so: joins_heads=True"),
    (Apart(), r"\(joins_heads\); they do not"),
  ],
  ids=["together", "apart"],
)
def test_a_method_says_whether_its_heads_choose_together(method, said):
  with pytest.raises(kvjax.InputError, match=said):
    check_method(method)


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_ours_say_so(name):
  subject = Subject(CASES[name].method)
  if subject.layer is None:
    pytest.skip("it evicts nothing")
  contract._check_heads(subject)
