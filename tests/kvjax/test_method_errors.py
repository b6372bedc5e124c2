"""Errors of a stranger's method say whose they are."""

import dataclasses

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.methods import HeadwiseMethod, ScoringMethod
from kvjax.testing import TinyModel


@dataclasses.dataclass(frozen=True)
class Misspelled(HeadwiseMethod):
  def score_head(self, head):
    return jnp.sum(head.value, axis=-1)


@dataclasses.dataclass(frozen=True)
class OneScore(ScoringMethod):
  def scores(self, layer, cache, activations):
    return jnp.sum(cache.values, axis=(2, 3))


@dataclasses.dataclass(frozen=True)
class HalfScores(Misspelled):
  def score_head(self, head):
    return jnp.sum(head.values, axis=-1).astype("float16")


@dataclasses.dataclass(frozen=True)
class NoScore(OneScore):
  def scores(self, layer, cache, activations):
    super().scores(layer, cache, activations)


def prefill(method, block):
  model = TinyModel()
  kvjax.prefill(
    model,
    model.init(),
    kvjax.Prompts.of([[1, 2, 3, 4]]),
    kvjax.Plan(method, kvjax.Tokens(2), schedule=kvjax.Schedule(block=block)),
  )


@pytest.mark.parametrize("block", [None, 2])
def test_an_error_in_a_prefill_names_the_method_that_it_comes_from(block):
  with pytest.raises(AttributeError) as caught:
    prefill(Misspelled(), block)
  assert "while Misspelled chose tokens" in caught.value.__notes__[0]
  assert "check_method" in caught.value.__notes__[0]


@pytest.mark.parametrize(
  ("method", "given"),
  [
    (OneScore(), r"float32 \(1, 2\)"),
    (HalfScores(), r"float16 \(1, 2, \d+\)"),
    (NoScore(), "NoneType"),
  ],
  ids=["shape", "dtype", "none"],
)
@pytest.mark.parametrize("block", [None, 2])
def test_what_is_no_score_per_slot_is_refused_in_a_sentence(
  method, given, block
):
  name = type(method).__name__
  with pytest.raises(
    kvjax.InputError,
    match=rf"^{name} must give every slot a score in float32, \(1, 2, \d+\) of "
    rf"them here, .* it gives {given}\.",
  ):
    prefill(method, block)
