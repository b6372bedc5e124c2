"""Prompts: how they are made, and what is refused in their place."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine.replay import common_prefix
from kvjax.errors import InputError, InputWarning
from kvjax.testing import TinyModel, kept_positions

MODEL = TinyModel()
PARAMS = MODEL.init()
ROWS = [np.random.default_rng(n).permutation(64)[:n].tolist() for n in (50, 9)]
PROMPTS = kvjax.Prompts.of(ROWS)
QUESTIONS = kvjax.Prompts.of([[5, 3], [8]])
KEYDIFF = kvjax.get_plan("keydiff", kvjax.Tokens(9))
TOKENS = np.ones((2, 4), np.int32)
LENGTHS = np.array([3, 4])


def prefilled(plan):
  return kvjax.prefill(MODEL, PARAMS, PROMPTS, plan)[0]


def test_prompts_may_be_an_array():
  array = np.array([[4, 2, 7], [1, 5, 6]])
  np.testing.assert_array_equal(
    kvjax.Prompts.of(array).tokens, kvjax.Prompts.of(array.tolist()).tokens
  )


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    ((TOKENS, LENGTHS, np.ones((2, 3), bool)), "shape of the tokens, 2 x 4"),
    ((TOKENS, LENGTHS, np.ones((2, 4), int)), "is true or false for every t"),
    ((TOKENS, np.array([3.5, 4])), "Lengths of prompts must be a 1-dimension"),
    ((TOKENS, np.array([[3], [4]])), "Lengths of prompts must be a 1-dimensi"),
    ((TOKENS, np.array([3])), "There are 2 prompts and 1 lengths"),
    ((TOKENS, np.array([3, 4, 4])), "There are 2 prompts and 3 lengths"),
    ((TOKENS * 1.0, LENGTHS), "Tokens of prompts must be a 2-dimensional ar"),
    ((TOKENS[0], LENGTHS), "Tokens of prompts must be a 2-dimensional array"),
    (([[1, 2]], LENGTHS), "Tokens of prompts .* kvjax.Prompts.of makes"),
  ],
)
def test_prompts_of_arrays_are_checked(arguments, said):
  with pytest.raises(InputError, match=said):
    kvjax.Prompts(*arguments)


def test_prompts_are_filled_with_what_jax_likes():
  prompts = kvjax.Prompts(TOKENS, LENGTHS, np.ones((2, 4), bool))
  shapes = jax.eval_shape(lambda given: given, prompts)
  assert shapes.tokens.shape == (2, 4)
  assert jax.tree.map(lambda _: None, prompts).lengths is None

  @jax.jit
  def traced(tokens):
    return kvjax.Prompts(tokens, LENGTHS).tokens

  np.testing.assert_array_equal(traced(TOKENS), TOKENS)


def test_a_row_of_prompts_is_one_that_there_is():
  assert PROMPTS.row(1).rows() == ROWS[1:]
  for index in (-1, 2, 5):
    with pytest.raises(InputError, match=f"no row {index} of .* are 0 to 1"):
      PROMPTS.row(index)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("given", [[[1, 2, 3]], "a text"], ids=["rows", "text"])
def test_what_is_no_prompts_is_told_how_to_make_them(given):
  cache = prefilled(KEYDIFF)
  blocks = kvjax.get_plan(
    "keydiff", kvjax.Tokens(9), schedule=kvjax.Schedule(block=8)
  )
  for call in (
    lambda: kvjax.prefill(MODEL, PARAMS, given, KEYDIFF),
    lambda: kvjax.prefill(MODEL, PARAMS, given, blocks),
    lambda: kvjax.sweep(MODEL, PARAMS, given, [KEYDIFF]),
    lambda: kvjax.measured_sweep(MODEL, PARAMS, given, [KEYDIFF]),
    lambda: kvjax.generate(MODEL, PARAMS, cache, given, kvjax.Decoding(2)),
    lambda: kvjax.negative_log_likelihood(MODEL, PARAMS, given),
    lambda: kvjax.recited(MODEL, PARAMS, given, cache, [cache]),
    lambda: kvjax.answer_nll(MODEL, PARAMS, cache, given, QUESTIONS),
    lambda: kvjax.answer_nll(MODEL, PARAMS, cache, QUESTIONS, given),
  ):
    with pytest.raises(InputError, match=r"lists of tokens with kvjax.Promp"):
      call()


def test_a_prompt_that_is_repeated_without_being_asked_for_is_told():
  kvzip = kvjax.get_plan("kvzip", kvjax.Tokens(9))
  request = kvjax.RepeatRequest(first=(1, 2), suffix=(3,))
  asked = dataclasses.replace(PROMPTS, repeat_request=request)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    kvjax.prefill(MODEL, PARAMS, asked, kvzip)
  with pytest.warns(InputWarning, match="these prompts do not say how"):
    kvjax.sweep(MODEL, PARAMS, PROMPTS, [kvzip])


def test_what_jit_does_not_know_is_refused_in_one_sentence():
  plan = kvjax.get_plan("keydiff", kvjax.Tokens(9))
  cache, decoding = prefilled(plan), kvjax.Decoding(2)

  def ask(cache, prompts):
    return kvjax.generate(MODEL, PARAMS, cache, prompts, decoding).tokens

  request = kvjax.RepeatRequest(first=(1, 2), suffix=(3,))
  asked = dataclasses.replace(PROMPTS, repeat_request=request)
  kvzip = kvjax.get_plan("kvzip", kvjax.Threshold(0.5))
  for call, given in (
    (lambda cache: ask(cache, QUESTIONS), cache),
    (lambda params: kvjax.prefill(MODEL, params, asked, kvzip), PARAMS),
  ):
    with pytest.raises(InputError, match=r"call it outside of both"):
      jax.jit(call)(given)
  for call in (
    lambda prompts: kvjax.prefill(MODEL, PARAMS, prompts, plan),
    lambda prompts: ask(cache, prompts),
    lambda prompts: kvjax.negative_log_likelihood(MODEL, PARAMS, prompts),
    lambda prompts: kvjax.answer_nll(MODEL, PARAMS, cache, prompts, QUESTIONS),
  ):
    with pytest.raises(InputError, match="Prompts cannot be arguments of jax"):
      jax.jit(call)(QUESTIONS)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("kind", ["uint8", "int8", "uint32", "int64"])
@pytest.mark.parametrize("name", ["chunked:length=16/keydiff", "kvzip"])
def test_lengths_of_any_integers_are_the_same(name, kind):
  tokens = np.arange(600, dtype=np.int32).reshape(2, 300) % 60
  plan = kvjax.get_plan(name, kvjax.Retention(0.5))

  def kept(kind):
    prompts = kvjax.Prompts(tokens, np.array([127, 101], kind))
    cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
    return [kept_positions(cache, row) for row in range(2)]

  assert kept(kind) == kept("int32")


def test_what_is_protected_of_padding_protects_nothing_that_follows():
  mask = np.zeros(PROMPTS.tokens.shape, bool)
  mask[:, 2] = True
  padded = mask.copy()
  padded[1, 9:] = True
  plan = kvjax.get_plan("keydiff", 9, schedule=kvjax.Schedule(every=2))
  kept = []
  for protected in (mask, padded):
    prompts = dataclasses.replace(PROMPTS, protected=protected)
    cache, logits = kvjax.prefill(MODEL, PARAMS, prompts, plan)
    cache = kvjax.reserve(cache, 20)
    decoding = kvjax.Decoding(20)
    turn = kvjax.generate(MODEL, PARAMS, cache, logits, decoding, keep=True)
    kept.append(kept_positions(turn.cache, 1))
  assert kept[0] == kept[1]


@pytest.mark.usefixtures("untyped")
def test_tokens_may_be_narrower_than_the_ids_of_a_template():
  tokens = jnp.array([[5, 290 % 256, 7], [5, 9, 7]], jnp.uint8)
  found = common_prefix(tokens, jnp.array([3, 1]), ids=(5, 290))
  np.testing.assert_array_equal(found, [1, 1])
