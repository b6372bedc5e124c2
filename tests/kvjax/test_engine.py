"""Prefill, sweep and decoding on a tiny model."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.allocation import Sizes
from kvjax.engine import compress, prompt_programs
from kvjax.engine import generate as generating
from kvjax.engine.forward import hidden_states
from kvjax.engine.sampling import Sampling
from kvjax.errors import InputError
from kvjax.methods import FullKV, KeyDiff
from kvjax.model import Geometry
from kvjax.testing import TinyModel, kept_positions, poison_cache

# Half the time to compile, where one layer shows it all.
MODEL = TinyModel(Geometry.uniform(1, 4, 2, 8, 4096))
PARAMS = MODEL.init()
DEEP = TinyModel()
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2], list(range(30))]
QUESTIONS = [[5, 3], [8], [9, 7, 9]]
FULL = FullKV()
ALL = kvjax.Retention(1.0)


@functools.partial(jax.jit, static_argnums=0)
def _dense(model, params, tokens):
  """Logits at every position, every token attending densely in float32."""

  def attend(layer, state, activations):
    del layer
    block = activations.queries, activations.keys, activations.values
    swapped = [jnp.swapaxes(x, 1, 2) for x in block]
    output = jax.nn.dot_product_attention(*swapped, is_causal=True)
    return jnp.swapaxes(output, 1, 2), state

  places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  states = (None,) * model.geometry.num_layers
  hidden, _ = hidden_states(model, params, tokens, places, states, attend)
  return model.logits(params, hidden)[0]


def dense_logits(row, model=MODEL):
  """Logits after the last token; what follows it cannot matter."""
  padded = jnp.zeros((1, 64), jnp.int32).at[0, : len(row)].set(np.array(row))
  return np.asarray(_dense(model, model.init(), padded))[len(row) - 1]


def greedy(row, count, model=MODEL):
  """Greedy decoding that recomputes everything for every token."""
  row = list(row)
  for _ in range(count):
    row.append(int(dense_logits(row, model).argmax()))
  return row[-count:]


def ask(cache, questions=QUESTIONS, model=MODEL, **kwargs):
  decoding = kvjax.Decoding(**{"max_new_tokens": 5, **kwargs})
  prompts = kvjax.Prompts.of(questions)
  return kvjax.generate(model, model.init(), cache, prompts, decoding)


def turn(cache, questions=QUESTIONS, count=4):
  """A turn of a conversation: the answers, and the cache then."""
  prompts, decoding = kvjax.Prompts.of(questions), kvjax.Decoding(count)
  found = kvjax.generate(MODEL, PARAMS, cache, prompts, decoding, keep=True)
  return found.rows(), found.cache


@pytest.fixture(scope="module")
def full():
  prompts = kvjax.Prompts.of(ROWS)
  return kvjax.prefill(MODEL, PARAMS, prompts, kvjax.Plan(FULL, ALL))


def test_logits_and_answers_equal_recomputing_everything():
  prompts, plan = kvjax.Prompts.of(ROWS), kvjax.Plan(FULL, ALL)
  cache, logits = kvjax.prefill(DEEP, DEEP.init(), prompts, plan)
  for row, ours in zip(ROWS, logits, strict=True):
    np.testing.assert_allclose(ours, dense_logits(row, DEEP), rtol=0, atol=2e-5)
  expected = [
    greedy(row + question, 5, DEEP)
    for row, question in zip(ROWS, QUESTIONS, strict=True)
  ]
  assert ask(cache, model=DEEP).rows() == expected


@pytest.mark.slow
def test_a_cache_can_be_asked_again(full):
  cache, _ = full
  first = ask(cache).rows()
  ask(cache, [[1, 2, 3]] * 3)
  assert ask(cache).rows() == first


def go_on(cache, logits, count):
  """Decodes right after a prefill."""
  decoding = kvjax.Decoding(count)
  return kvjax.generate(MODEL, PARAMS, cache, logits, decoding)


def test_without_a_prompt_it_goes_on_from_the_prefill(full):
  answers = go_on(*full, 4)
  assert answers.rows() == [greedy(row, 4) for row in ROWS]


def test_a_row_ends_at_its_own_stop_token(full):
  cache, _ = full
  free = ask(cache).rows()
  stop = free[1][2]
  stopped = ask(cache, stop_ids=(stop, 63)).rows()
  for row, shorter in zip(free, stopped, strict=True):
    ends = [i for i, token in enumerate(row) if token in (stop, 63)]
    assert shorter == row[: ends[0] if ends else None]


def test_answers_are_padded_with_minus_one(full):
  cache, _ = full
  stop = ask(cache).rows()[1][2]
  answers = ask(cache, stop_ids=(stop,))
  assert answers.cache is None
  pairs = zip(answers.tokens.tolist(), answers.lengths.tolist(), strict=True)
  for row, length in pairs:
    row = np.array(row)
    assert np.all(row[:length] >= 0)
    assert np.all(row[length:] == -1)


def test_conversation_equals_one_long_prompt():
  prompts = kvjax.Prompts.of(ROWS)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, kvjax.Plan(FULL, ALL))
  cache = kvjax.reserve(cache, 128)
  history = [list(row) for row in ROWS]
  for asked in (QUESTIONS, [[4, 4], [1, 2, 3], [7]]):
    answers, cache = turn(cache, asked)
    for row, question, ours in zip(history, asked, answers, strict=True):
      row += question
      assert ours == greedy(row, 4)
      row += ours
  assert cache.next_positions.tolist() == [len(row) for row in history]
  assert cache.lengths[0, :, 0].tolist() == [len(row) for row in history]


def test_conversation_uses_the_buffers_of_its_cache():
  prompts = kvjax.Prompts.of(ROWS)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, kvjax.Plan(FULL, ALL))
  cache = kvjax.reserve(cache, 64)
  (before,) = cache.stacks
  place = before.keys.unsafe_buffer_pointer()
  _, after = turn(cache)
  assert before.keys.is_deleted()
  assert after.stacks[0].keys.unsafe_buffer_pointer() == place


def test_conversation_without_room_is_refused(full):
  cache, _ = full
  with pytest.raises(InputError, match=r"kvjax\.reserve"):
    turn(cache)


@pytest.mark.slow
def test_sweep_equals_each_plan_alone():
  """Budgets, schedules and heads in one pass, where every method chooses."""
  rng = np.random.default_rng(0)
  rows = [rng.permutation(64)[:n].tolist() for n in (50, 33)]
  prompts = kvjax.Prompts.of(rows)
  share, few = kvjax.Retention(0.4), kvjax.Tokens(9)
  going_on = kvjax.Schedule(every=2)
  plans = [
    kvjax.get_plan("keydiff", share),
    kvjax.get_plan("keydiff", few),
    kvjax.get_plan("keydiff", few, per_query_head=True),
    kvjax.get_plan("h2o", few),
    kvjax.get_plan("h2o", share, schedule=kvjax.Schedule(every=3)),
    kvjax.get_plan("snapkv:window=3", few, schedule=going_on),
    kvjax.get_plan("lagkv:sinks=2:lag=6", share, schedule=going_on),
  ]
  together, _ = kvjax.sweep(MODEL, PARAMS, prompts, plans)
  for plan, cache in zip(plans, together, strict=True):
    assert cache.plan == (plan if plan.schedule.every else None)
    alone, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
    jax.tree.map(np.testing.assert_array_equal, alone, cache)


def test_what_does_not_belong_to_a_cache_is_refused():
  plan = kvjax.Plan(KeyDiff(), kvjax.Tokens(4))
  cache, logits = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  decoding = kvjax.Decoding(2)
  go_on = functools.partial(kvjax.generate, MODEL, PARAMS)
  with pytest.raises(InputError, match="3 rows and the logits 2"):
    go_on(cache, logits[:2], decoding)
  questions = kvjax.Prompts.of(QUESTIONS)
  with pytest.raises(InputError, match="3 rows and 2 seeds; give one for each"):
    go_on(cache, questions, decoding, seeds=jnp.arange(2))


def test_activations_that_a_model_lacks_are_named():
  class Terse(TinyModel):
    def block(self, *arguments):
      *rest, attend = arguments

      def attend_to_less(activations):
        return attend(dataclasses.replace(activations, keys_unrotated=None))

      return super().block(*rest, attend_to_less)

  plans = [
    kvjax.get_plan(name, kvjax.Tokens(4)) for name in ("snapkv", "compactor")
  ]
  with pytest.raises(InputError, match="compactor reads keys_unrotated, which"):
    kvjax.sweep(Terse(MODEL.geometry), PARAMS, kvjax.Prompts.of(ROWS), plans)


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_a_row_answers_as_it_does_alone(name):
  plan = kvjax.get_plan(name, kvjax.Retention(0.5))
  together, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  rows = ask(together).rows()
  for index, row in enumerate(ROWS):
    alone, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of([row]), plan)
    assert kept_positions(together, index) == kept_positions(alone, 0)
    assert ask(alone, [QUESTIONS[index]]).rows()[0] == rows[index]


def test_question_positions_follow_the_uncompressed_context():
  plan = kvjax.Plan(KeyDiff(), kvjax.Tokens(4))
  cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  assert cache.next_positions.tolist() == [len(row) for row in ROWS]
  cache = kvjax.reserve(cache, 64)
  _, cache = turn(cache, count=1)
  for index, row in enumerate(ROWS):
    end = len(row) + len(QUESTIONS[index])
    valid = kept_positions(cache, index)[0][0]
    assert valid[4:] == list(range(len(row), end + 1))


def test_bytes_are_counted_exactly():
  prompts = kvjax.Prompts.of(ROWS)  # padded to 32
  for model, size in ((MODEL, 4), (TinyModel(dtype="bfloat16"), 2)):
    cache, _ = kvjax.prefill(
      model, model.init(), prompts, kvjax.Plan(KeyDiff(), kvjax.Tokens(10))
    )
    spec, layers = model.geometry.layers[0], model.geometry.num_layers
    per_slot = 2 * spec.key_dim * size + 4
    slots = len(ROWS) * spec.kv_heads * 10
    expected = layers * (slots * per_slot + 4) + len(ROWS) * 4
    assert cache.nbytes == expected
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache))


def test_prompts_of_one_bucket_share_a_program():
  def run(lengths):
    prompts = kvjax.Prompts.of([list(range(n)) for n in lengths])
    return kvjax.prefill(
      MODEL, PARAMS, prompts, kvjax.Plan(KeyDiff(), kvjax.Tokens(8))
    )

  def count():
    programs = [
      prompt_programs.embed,
      prompt_programs.forward_layer,
      prompt_programs.head,
      compress.evaluate_layer,
      compress.select_layer,
      compress.keep_layer,
      compress.keep_single,
      generating._generate_and_discard,
    ]
    return [program._cache_size() for program in programs]

  cache, _ = run([33, 40])
  ask(cache, [[1], [2]])
  before = count()
  cache, _ = run([48, 35])
  ask(cache, [[1, 2, 3], [2] * 30])
  assert count() == before


def test_nan_in_empty_slots_changes_no_conversation():
  plan = kvjax.Plan(KeyDiff(), kvjax.Retention(0.5))
  cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  clean, dirty = (
    turn(kvjax.reserve(x, 64))[0] for x in (cache, poison_cache(cache))
  )
  assert clean == dirty


@pytest.mark.parametrize("padded", [61, 96])
def test_padding_to_the_capacity_changes_nothing(padded):
  """Where the roomiest row's count is the padded length, others still lose."""
  model = TinyModel(Geometry.uniform(5, 4, 2, 8, 4096))
  prompts = kvjax.Prompts.of([list(range(61))], padded)
  budget = kvjax.Retention(0.97)
  plan = kvjax.get_plan("pyramid/keydiff", budget)
  cache, _ = kvjax.prefill(model, model.init(), prompts, plan)
  counts = plan.spread.counts(budget, np.array([61]), Sizes((2,) * 5))
  assert len(set(counts[:, 0].tolist())) > 1
  np.testing.assert_array_equal(cache.lengths[:, 0, 0], counts[:, 0])


def test_sampling_depends_on_seed_and_position_only(full):
  cache, _ = full
  sampling = Sampling(temperature=1.5)
  decoding = kvjax.Decoding(5, sampling=sampling)
  prompts = kvjax.Prompts.of(QUESTIONS)

  def run(cache, prompts, seeds):
    return kvjax.generate(
      MODEL, PARAMS, cache, prompts, decoding, seeds=np.asarray(seeds)
    ).rows()

  rows = run(cache, prompts, [1, 2, 3])
  assert rows == run(cache, prompts, [1, 2, 3])
  assert rows != run(cache, prompts, [4, 5, 6])
  alone, _ = kvjax.prefill(
    MODEL, PARAMS, kvjax.Prompts.of([ROWS[1]]), kvjax.Plan(FULL, ALL)
  )
  assert run(alone, kvjax.Prompts.of([QUESTIONS[1]]), [2])[0] == rows[1]


@pytest.mark.parametrize(
  ("call", "said"),
  [
    (lambda: kvjax.Prompts.of([]), "no prompts"),
    (lambda: kvjax.Prompts.of([[1], []]), "Prompt 1 has no tokens"),
    (lambda: kvjax.Decoding(0), "max_new_tokens"),
    (lambda: kvjax.sweep(MODEL, PARAMS, kvjax.Prompts.of([[1]]), []), "plan"),
    (lambda: kvjax.Prompts(np.zeros((1, 4), int), np.array([9])), "the 4 tok"),
    (lambda: kvjax.Prompts(np.zeros((1, 4), int), np.array([0])), "between 1"),
    (lambda: Sampling(-1.0), "temperature"),
    (lambda: Sampling(1.0, 0.0), "top_p"),
    (
      lambda: kvjax.prefill(
        MODEL, PARAMS, kvjax.Prompts.of([[1] * 4097]), kvjax.Plan(FULL, ALL)
      ),
      "4097 tokens; this model's context is 4096",
    ),
  ],
)
def test_mistakes_are_explained(call, said):
  with pytest.raises(InputError, match=said):
    call()


@pytest.mark.parametrize(
  ("method", "budget", "said"),
  [
    ("keydiff", ALL, "'keydiff' is no such method"),
    (kvjax.get_retrieval("flat"), ALL, r"no such method: kvjax\.get_plan"),
    (
      kvjax.get_retrieval("flat"),
      ALL,
      r"takes this one as sparse=kvjax\.SparseAttention\(retrieval, keys\)",
    ),
    (
      KeyDiff,
      ALL,
      r"such as kvjax\.get_.*; KeyDiff is a class: write KeyDiff\(\)",
    ),
    (FULL, None, r"a share such as 0\.25, tokens .*; None is none of them"),
  ],
)
def test_a_name_is_no_method_and_none_is_no_budget(method, budget, said):
  """Types are checked in tests alone: without, the plan says so itself."""
  plan = object.__new__(kvjax.Plan)
  unchecked = inspect.unwrap(kvjax.Plan.__init__)
  with pytest.raises(InputError, match=said):
    unchecked(plan, method, budget)


@pytest.mark.parametrize("rows", ["Hello", ["Hello", "you"], [1, 2, 3]])
def test_prompts_are_rows_of_token_ids(rows):
  """As above."""
  unchecked = inspect.unwrap(kvjax.Prompts.of.__func__)
  with pytest.raises(InputError, match="rows of token ids"):
    unchecked(kvjax.Prompts, rows)


def test_questions_must_match_the_rows(full):
  with pytest.raises(InputError, match="3 rows and 1 questions"):
    ask(full[0], [[1]])


def test_an_answer_must_fit_the_context(full):
  with pytest.raises(InputError, match="context is 4096"):
    ask(full[0], max_new_tokens=4090)
  with pytest.raises(InputError, match="context is 4096"):
    go_on(*full, 4090)
