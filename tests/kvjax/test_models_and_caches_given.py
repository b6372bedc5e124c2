"""Anything but a model, and donated caches, are refused in one sentence."""

import dataclasses
import types

import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
from kvjax.testing import TinyModel

MODEL = TinyModel()
PARAMS = MODEL.init()
ROWS = [np.random.default_rng(n).permutation(64)[:n].tolist() for n in (50, 9)]
PROMPTS = kvjax.Prompts.of(ROWS)
QUESTIONS = kvjax.Prompts.of([[5, 3], [8]])
KEYDIFF = kvjax.get_plan("keydiff", kvjax.Tokens(9))


def prefilled(plan):
  return kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)[0]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
  "given",
  [types.SimpleNamespace(model=MODEL, params=PARAMS), PARAMS, TinyModel],
)
def test_anything_but_a_model_is_refused(given, tmp_path):
  """What `kvjax.load` returns, weights, or the class in the model's place."""
  cache, logits = kvjax.prefill(MODEL, PARAMS, PROMPTS, KEYDIFF)
  in_blocks = kvjax.get_plan(
    "keydiff", kvjax.Tokens(9), schedule=kvjax.Schedule(block=8)
  )
  decoding, path = kvjax.Decoding(2), tmp_path / "cache"
  for use in (
    lambda: kvjax.prefill(given, PARAMS, PROMPTS, KEYDIFF),
    lambda: kvjax.prefill(given, PARAMS, PROMPTS, in_blocks),
    lambda: kvjax.sweep(given, PARAMS, PROMPTS, [KEYDIFF]),
    lambda: kvjax.measured_sweep(given, PARAMS, PROMPTS, [KEYDIFF]),
    lambda: kvjax.generate(given, PARAMS, cache, logits, decoding),
    lambda: kvjax.generate(given, PARAMS, [cache], logits, decoding),
    lambda: kvjax.stream(given, PARAMS, cache, logits, decoding),
    lambda: kvjax.answer_nll(given, PARAMS, cache, QUESTIONS, QUESTIONS),
    lambda: kvjax.recited(given, PARAMS, PROMPTS, cache, [cache]),
    lambda: kvjax.negative_log_likelihood(given, PARAMS, PROMPTS),
    lambda: kvjax.calibrate_queries(given, PARAMS, [[*range(9)]]),
    lambda: kvjax.save_cache(cache, path, model=given, model_id="tiny"),
    lambda: kvjax.load_cache(path, model=given, model_id="tiny"),
  ):
    with pytest.raises(InputError, match=r"such as lm\.model, .*, not a "):
      use()


@dataclasses.dataclass
class Changeable:
  """A dataclass without frozen=True, which Python does not hash."""

  geometry: kvjax.Geometry = MODEL.geometry
  embed = layer_weights = block = normalize = logits = print


@pytest.mark.usefixtures("untyped")
def test_a_model_that_is_not_hashable_is_refused():
  for model in (Changeable(), TinyModel(width=np.zeros(1))):
    name = type(model).__name__
    with pytest.raises(InputError, match=f"is hashable, .* this {name} is not"):
      kvjax.prefill(model, PARAMS, PROMPTS, KEYDIFF)


def test_a_cache_that_a_turn_has_taken_over_is_refused(tmp_path):
  cache = kvjax.reserve(
    prefilled(kvjax.get_plan("keydiff", kvjax.Tokens(9))), 64
  )
  decoding = kvjax.Decoding(2)
  kept = kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, decoding, keep=True)
  for use in (
    lambda: kvjax.generate(MODEL, PARAMS, cache, QUESTIONS, decoding),
    lambda: kvjax.generate(
      MODEL, PARAMS, [kept.cache, cache], QUESTIONS, decoding
    ),
    lambda: kvjax.stream(MODEL, PARAMS, cache, QUESTIONS, decoding),
    lambda: kvjax.answer_nll(MODEL, PARAMS, cache, QUESTIONS, QUESTIONS),
    lambda: kvjax.recited(MODEL, PARAMS, PROMPTS, cache, [kept.cache]),
    lambda: kvjax.recited(MODEL, PARAMS, PROMPTS, kept.cache, [cache]),
    lambda: kvjax.decoding_nbytes(MODEL, cache, 0, decoding),
    lambda: kvjax.reserve(cache, 1),
    lambda: kvjax.stack([kept.cache, cache]),
    lambda: kvjax.group_caches([cache]),
    lambda: kvjax.unstack(cache, 2),
    lambda: kvjax.save_cache(
      cache, tmp_path / "cache", model=MODEL, model_id="tiny"
    ),
  ):
    with pytest.raises(InputError, match="arrays have been donated, as a turn"):
      use()
  assert not (tmp_path / "cache").exists()
  kvjax.generate(MODEL, PARAMS, kept.cache, QUESTIONS, decoding)
