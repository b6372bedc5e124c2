"""Errors of a stranger's method say whose they are."""

import dataclasses

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.methods import HeadwiseMethod
from kvjax.testing import TinyModel


@dataclasses.dataclass(frozen=True)
class Misspelled(HeadwiseMethod):
  def score_head(self, head):
    return jnp.sum(head.value, axis=-1)


@dataclasses.dataclass(frozen=True)
class OneScore(HeadwiseMethod):
  def score_head(self, head):
    return jnp.sum(head.values)


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("method", [Misspelled(), OneScore()])
def test_an_error_in_a_prefill_names_the_method_that_it_comes_from(
  method, block
):
  model = TinyModel()
  with pytest.raises(Exception) as caught:  # noqa: PT011
    kvjax.prefill(
      model,
      model.init(),
      kvjax.Prompts.of([[1, 2, 3, 4]]),
      kvjax.Plan(method, kvjax.Tokens(2), schedule=kvjax.Schedule(block=block)),
    )
  assert (
    f"while {type(method).__name__} chose tokens" in caught.value.__notes__[0]
  )
  assert "check_method" in caught.value.__notes__[0]
