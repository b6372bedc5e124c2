"""How likely texts are, against float64 sums over dense logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import kernels
from kvjax.cache import rows
from kvjax.engine import likelihood, prompt_programs
from kvjax.engine.feed import feed
from kvjax.engine.forward import hidden_states
from kvjax.errors import InputError
from kvjax.methods import KeyDiff
from kvjax.testing import TinyModel, poison_cache

MODEL = TinyModel()
PARAMS = MODEL.init()
RNG = np.random.default_rng(0)
ROWS = [RNG.integers(0, 64, n).tolist() for n in (50, 33, 1, 2)]
QUESTIONS = [[5, 6, 1], [7], [1, 2], [9]]
ANSWERS = [[4], [3, 1, 4, 1], [8, 8], [60, 2, 7]]


@jax.jit
def dense(tokens):
  """Hidden states and logits at every position, by a library's attention."""

  def attend(_, state, seen):
    swapped = [
      jnp.swapaxes(x, 1, 2) for x in (seen.queries, seen.keys, seen.values)
    ]
    output = jax.nn.dot_product_attention(*swapped, is_causal=True)
    return jnp.swapaxes(output, 1, 2), state

  places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  nothing = (None,) * MODEL.geometry.num_layers
  hidden, _ = hidden_states(MODEL, PARAMS, tokens, places, nothing, attend)
  return hidden, MODEL.logits(PARAMS, hidden)


def losses(row):
  """-ln p of every token but the first, in float64."""
  padded = np.zeros((1, 64), np.int32)
  padded[0, : len(row)] = row
  logits = np.asarray(dense(padded)[1][0], np.float64)[: len(row) - 1]
  logits -= logits.max(axis=1, keepdims=True)
  p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  return -np.log(p[np.arange(len(row) - 1), row[1:]])


@functools.cache
def prefilled(name):
  plan = kvjax.get_plan(name, kvjax.Tokens(64 if name == "full" else 10))
  return kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)[0]


def answer_nll(cache, questions=QUESTIONS, answers=ANSWERS, params=PARAMS):
  return kvjax.answer_nll(
    MODEL, params, cache, kvjax.Prompts.of(questions), kvjax.Prompts.of(answers)
  )


def test_prompts_are_as_likely_as_float64_says():
  found = kvjax.negative_log_likelihood(MODEL, PARAMS, kvjax.Prompts.of(ROWS))
  expected = [losses(row).mean() if len(row) > 1 else np.nan for row in ROWS]
  np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("at_once", [1, 28, 9999])
def test_parts_add_up_and_padding_has_no_say(monkeypatch, at_once):
  """Parts of 1, 7 and all 50 positions of four rows."""
  monkeypatch.setattr(likelihood, "_AT_ONCE", at_once)
  prompts = kvjax.Prompts.of(ROWS, 50)
  hidden = jnp.stack([dense(row[None])[0][0] for row in prompts.tokens])
  real = np.arange(50)[None] < prompts.lengths[:, None]
  assert np.all(real[0])
  found = likelihood.prompt_nll(
    MODEL,
    PARAMS,
    jnp.where(real[..., None], hidden, jnp.nan),
    jnp.asarray(np.where(real, prompts.tokens, -1)),
    jnp.asarray(prompts.lengths),
  )
  expected = [losses(row).mean() if len(row) > 1 else np.nan for row in ROWS]
  np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_memory_does_not_grow_with_the_logits_of_a_prompt():
  model, length = TinyModel(vocab_size=16_384), 4096
  int32 = functools.partial(jax.ShapeDtypeStruct, dtype="int32")
  params = jax.eval_shape(model.init)
  given = (int32((1, length)), int32((1,)))
  hidden = jax.ShapeDtypeStruct((1, length, model.width), "float32")
  alone = likelihood._nll.lower(model, params, *given)
  measured, plain = (
    prompt_programs.head.lower(
      params, hidden, *given, model=model, measured=measured
    )
    for measured in (True, False)
  )
  alone, measured, plain = (
    lowered.compile().memory_analysis().temp_size_in_bytes
    for lowered in (alone, measured, plain)
  )
  logits = length * 16_384 * 4
  # 256 positions at once, and as much again for their exponentials.
  assert alone < logits / 4
  assert measured < plain + logits / 4


@pytest.mark.parametrize("poison", [False, True])
def test_answers_are_as_likely_as_float64_says(poison):
  cache = prefilled("full")
  found = answer_nll(poison_cache(cache) if poison else cache)
  expected = [
    losses([*row, *question, *answer])[-len(answer) :].mean()
    for row, question, answer in zip(ROWS, QUESTIONS, ANSWERS, strict=True)
  ]
  np.testing.assert_allclose(found, expected, rtol=2e-6)


@pytest.mark.parametrize("method", ["keydiff", "ada/keydiff"])
def test_a_compressed_cache_is_asked_token_by_token(method):
  """Teacher-forced as by decoding that is told what to say."""
  cache = prefilled(method)
  found = answer_nll(cache)
  fed = kvjax.reserve(cache, 7)
  step = jax.jit(feed, static_argnums=0)
  total = np.zeros(4)
  logits = None
  for index in range(7):
    row = [
      (q + a)[index] if index < len(q + a) else 0
      for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    alive = [
      int(index < len(q + a)) for q, a in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    for r, (q, a) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
      if len(q) <= index < len(q + a):
        wide = np.asarray(logits[r], np.float64)
        total[r] += np.log(np.exp(wide - wide[row[r]]).sum()) / len(a)
    logits, fed = step(
      MODEL, PARAMS, fed, jnp.asarray(row)[:, None], jnp.asarray(alive)
    )
  np.testing.assert_allclose(found, total, rtol=5e-6)
  whole = answer_nll(prefilled("full"))
  assert np.all(np.abs(found[:2] - whole[:2]) > 1e-3)


def test_questions_and_answers_of_one_shape_share_a_program():
  cache, counts = prefilled("full"), []
  for question, answer in ((3, 2), (20, 25), (32, 32)):
    asked = [[1] * question, [2], [3], [4]]
    answers = [[5] * answer, [6], [7], [8]]
    answer_nll(cache, asked, answers)
    counts.append(likelihood._answer_nll._cache_size())
  assert counts == counts[:1] * 3


def test_mistakes_are_explained():
  cache = prefilled("full")
  with pytest.raises(InputError, match="4 rows, 1 questions and 4 answers"):
    answer_nll(cache, QUESTIONS[:1])
  with pytest.raises(InputError, match="4 rows, 4 questions and 2 answers"):
    answer_nll(cache, answers=ANSWERS[:2])
  with pytest.raises(InputError, match=r"has 4\d+ tokens; .* context is 4096"):
    answer_nll(cache, answers=[[1] * 4090] * 4)
  masked = kvjax.Prompts.of([[1]] * 4, protected=[[True]] * 4)
  plain = kvjax.Prompts.of([[1]] * 4)
  for question, answer in ((masked, plain), (plain, masked)):
    with pytest.raises(InputError, match="give what follows without a mask"):
      kvjax.answer_nll(MODEL, PARAMS, cache, question, answer)
  prompts = kvjax.Prompts.of([[1] * 4097])
  with pytest.raises(InputError, match="context is 4096"):
    kvjax.negative_log_likelihood(MODEL, PARAMS, prompts)
  schedule = kvjax.Schedule(every=2)
  plan = kvjax.Plan(KeyDiff(), kvjax.Tokens(10), schedule=schedule)
  cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  with pytest.raises(InputError, match="goes on evicting every 2"):
    answer_nll(cache)


@pytest.mark.parametrize(
  ("name", "tokens"), [("full", 64), ("snapkv:window=4", 10)]
)
def test_answers_have_gradients_through_a_prefill(name, tokens):
  """Within one program, by all weights at once, against a difference."""
  prompts = kvjax.Prompts.of(ROWS)
  plan = kvjax.get_plan(name, kvjax.Tokens(tokens))

  def total(params):
    cache, _ = kvjax.prefill(MODEL, params, prompts, plan)
    return answer_nll(cache, params=params).sum()

  @jax.jit
  def moved(size):
    return jax.tree.map(lambda x: x * (1 + size), PARAMS)

  value, gradient = jax.jit(jax.value_and_grad(total))(PARAMS)
  np.testing.assert_allclose(value, total(PARAMS), rtol=1e-6)
  slope = sum(
    np.vdot(x, y)
    for x, y in zip(
      jax.tree.leaves(PARAMS), jax.tree.leaves(gradient), strict=True
    )
  )
  step = 3e-4  # the same tokens are kept
  difference = total(moved(step)) - total(moved(-step))
  np.testing.assert_allclose(slope, difference / (2 * step), rtol=1e-2)


def test_gradients_go_through_keys_that_are_ranked_in_tiles(monkeypatch):
  context = [np.random.default_rng(5).integers(0, 64, 61).tolist()]
  plan = kvjax.get_plan("ctkvr:local=4:sinks=1", kvjax.Tokens(16))
  cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(context), plan)
  question, answer = kvjax.Prompts.of([[7, 3]]), kvjax.Prompts.of([[5, 9, 2]])

  def gradient(tile):
    monkeypatch.setattr(rows, "_TILE", tile)
    jax.clear_caches()
    return jax.grad(
      lambda params: kvjax.answer_nll(
        MODEL, params, cache, question, answer
      ).sum()
    )(PARAMS)

  whole, in_tiles = gradient(10**6), gradient(8)
  assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole)) > 0.1
  for x, y in zip(
    jax.tree.leaves(whole), jax.tree.leaves(in_tiles), strict=True
  ):
    np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize(
  ("platform", "name"),
  [
    *(
      ("cpu", name)
      for name in (
        *("adakv", "chunkkv", "compactor", "criticalkv", "expected_attention"),
        *("h2o", "lagkv", "noncausal", "protokv", "pyramidkv", "rkv", "tova"),
      )
    ),
    *(("tpu", name) for name in ("full", "snapkv", "adakv", "compactor")),
  ],
)
def test_gradients_can_be_traced_through_methods(platform, name):
  """Selection has none; kernels have those of XLA's programs."""
  prompts = kvjax.Prompts.of([[*range(60)] * 2])
  plan = kvjax.get_plan(name, kvjax.Tokens(50))

  def total(params):
    cache, _ = kvjax.prefill(MODEL, params, prompts, plan)
    return answer_nll(cache, QUESTIONS[:1], ANSWERS[:1], params).sum()

  with kernels.use(platform=platform):
    traced = str(jax.make_jaxpr(jax.grad(total))(PARAMS))
  assert ("pallas_call" in traced) == (platform == "tpu")


def test_a_traced_cache_leaves_other_checks_in_place():
  cache = prefilled("keydiff")
  np.testing.assert_allclose(
    jax.jit(answer_nll)(cache), answer_nll(cache), rtol=1e-6
  )
  with pytest.raises(InputError, match=r"has 4\d+ tokens; .* context is 4096"):
    jax.jit(lambda cache: answer_nll(cache, answers=[[1] * 4096] * 4))(cache)
