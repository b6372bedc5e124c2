"""Learned gates between blocks and while decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from made_up_gates import kvzap_tensors, write_fast_kvzip, write_kvzap
from placed_model import Placed

import kvjax
from kvjax.errors import InputError
from kvjax.model import Geometry
from kvjax.testing import kept_positions

WIDTH, KV_HEADS, HIDDEN = 32, 2, 5
SIZES = (WIDTH, KV_HEADS, 1, HIDDEN)
ROWS = [
  np.random.default_rng(n).permutation(64)[:n].tolist() for n in (61, 40, 17)
]
ASKED = [[5, 3], [8], [9, 7, 9]]
KEPT, RECENT, EVERY = 12, 3, 4

MODEL = Placed(Geometry.uniform(1, 4, KV_HEADS, 8, 4096))
PARAMS = MODEL.init()


def inputs_of(tokens):
  """What the only layer reads, as there is no norm; float64."""
  places = jnp.arange(len(tokens))[None]
  hidden, _ = MODEL.embed(PARAMS, jnp.array([tokens]), places)
  return np.asarray(hidden[0], np.float64)


def kvzap_scores(tokens, seed=0):
  """[K, S], in float64."""
  tensors = kvzap_tensors(*SIZES, seed=seed)
  w = {name: x.astype(float) for name, x in tensors.items()}
  found = inputs_of(tokens) @ w["layers.0.0.weight"].T + w["layers.0.0.bias"]
  # GELU without its approximation.
  found = np.asarray(jax.nn.gelu(found.astype(np.float32), approximate=False))
  return (found @ w["layers.0.2.weight"].T + w["layers.0.2.bias"]).T


def best(scores, candidates, recent):
  """The kept ones of ascending candidates: the last, and the highest."""
  last = candidates[len(candidates) - recent :]
  rest = candidates[: len(candidates) - recent]
  ranked = sorted(rest, key=lambda place: -scores[place])
  return sorted([*last, *ranked[: KEPT - recent]])


def expected(row, question, answer, recent):
  """What each head keeps, token by token."""
  scores = kvzap_scores([*row, *question, *answer])
  heads = []
  for head in scores:
    kept = best(head, [*range(len(row))], recent)
    end = len(row) + len(question)
    kept += range(len(row), end)
    for start in range(0, len(answer), EVERY):
      turn = answer[start : start + EVERY]
      kept += range(end + start, end + start + len(turn))
      kept = best(head, kept, recent)
    heads.append(kept)
  return heads


def gated(gate, options="", decoding=None, **schedule):
  """A plan by a gate whose heads have budgets of their own."""
  return kvjax.get_plan(
    f"kvzap:gate={gate}:level=head{options}",
    kvjax.Tokens(KEPT),
    schedule=kvjax.Schedule(**schedule),
    decoding=decoding,
  )


def converse(plan, rows=ROWS, asked=ASKED):
  """Caches after the prompts, answers, and caches after these."""
  prompts = kvjax.Prompts.of(rows, 64)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  prompt = [kept_positions(cache, row)[0] for row in range(len(rows))]
  questions = kvjax.Prompts.of(asked, 8)
  cache = kvjax.reserve(cache, 40)
  answers = kvjax.generate(
    MODEL, PARAMS, cache, questions, kvjax.Decoding(30), keep=True
  )
  after = answers.cache
  later = [kept_positions(after, row)[0] for row in range(len(rows))]
  return prompt, answers, later


@pytest.mark.parametrize("recent", [0, RECENT])
def test_an_answer_keeps_the_best_of_all_tokens(recent, tmp_path):
  gate = write_kvzap(tmp_path, *SIZES)
  plan = gated(gate, f":recent={recent}", every=EVERY)
  prompt, answers, later = converse(plan)
  for row, question, answer, kept, after in zip(
    ROWS, ASKED, answers.rows(), prompt, later, strict=True
  ):
    scores = kvzap_scores(row)
    assert kept == [best(head, [*range(len(row))], recent) for head in scores]
    assert after == expected(row, question, answer, recent)


@pytest.mark.parametrize("method", ["full", "keydiff"])
def test_a_gate_goes_on_from_the_cache_of_another_method(method, tmp_path):
  gate = write_kvzap(tmp_path, *SIZES)
  later = gated(gate, every=EVERY)
  budget = kvjax.Retention(1) if method == "full" else kvjax.Tokens(20)
  plan = kvjax.get_plan(method, budget, decoding=later)
  prompt, answers, after = converse(plan)
  for number, (row, question, answer) in enumerate(
    zip(ROWS, ASKED, answers.rows(), strict=True)
  ):
    all_tokens = [*row, *question, *answer]
    new = [*range(len(row), len(all_tokens))]
    for head, scores in enumerate(kvzap_scores(all_tokens)):
      # Whatever is not among the best will never be.
      kept = best(scores, [*prompt[number][head], *new], 0)
      assert after[number][head] == kept


@pytest.mark.parametrize("first", [None, 24])
@pytest.mark.parametrize("kind", ["kvzap", "fast_kvzip"])
def test_blocks_keep_what_a_whole_prompt_keeps(kind, first, tmp_path):
  """The first layer's inputs do not depend on what is evicted."""
  if kind == "kvzap":
    gate = write_kvzap(tmp_path, *SIZES)
  else:
    gate = write_fast_kvzip(tmp_path / "gate.pt", WIDTH, KV_HEADS, 1)
    gate = f"{gate}:recent=0"
  name = f"{kind}:gate={gate}:level=head"
  kept = []
  for schedule in (kvjax.Schedule(), kvjax.Schedule(block=8, first=first)):
    plan = kvjax.get_plan(name, kvjax.Tokens(KEPT), schedule=schedule)
    cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
    assert cache.layers[0].remembered is None
    kept.append([kept_positions(cache, row) for row in range(len(ROWS))])
  assert kept[0] == kept[1]


def test_a_saved_cache_goes_on(tmp_path):
  gate = write_kvzap(tmp_path / "gate", *SIZES)
  plan = gated(gate, every=EVERY)
  prompts, asked = kvjax.Prompts.of(ROWS, 64), kvjax.Prompts.of(ASKED, 8)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  cache = kvjax.reserve(cache, 20)
  kvjax.save_cache(cache, tmp_path / "cache", model=MODEL, model_id="tiny")
  loaded = kvjax.load_cache(tmp_path / "cache", model=MODEL, model_id="tiny")
  assert loaded.nbytes == cache.nbytes
  decoding = kvjax.Decoding(10)
  one, other = (
    kvjax.generate(MODEL, PARAMS, each, asked, decoding, keep=True)
    for each in (cache, loaded)
  )
  np.testing.assert_array_equal(one.tokens, other.tokens)
  for row in range(len(ROWS)):
    assert kept_positions(one.cache, row) == kept_positions(other.cache, row)


def test_what_is_remembered_takes_four_bytes_a_token(tmp_path):
  gate = write_kvzap(tmp_path, *SIZES)
  sizes = []
  for schedule in ({}, {"every": EVERY}):
    plan = gated(gate, **schedule)
    cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
    sizes.append(cache.nbytes)
  assert sizes[1] - sizes[0] == 4 * len(ROWS) * KV_HEADS * KEPT


def test_a_gate_that_has_changed_is_read_again(tmp_path):
  """Weights are arguments of the programs, which know the path alone."""
  gate = write_kvzap(tmp_path, *SIZES)
  later = gated(gate, every=EVERY)
  plan = kvjax.get_plan("full", kvjax.Retention(1), decoding=later)
  _, _, before = converse(plan)
  tensors = kvzap_tensors(*SIZES, seed=3)
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  _, _, after = converse(plan)
  assert before != after


@pytest.mark.parametrize("schedule", [{"block": 8}, {"every": 4}])
def test_what_does_not_fit_is_one_sentence(schedule, tmp_path):
  schedule = kvjax.Schedule(**schedule)
  gate = write_kvzap(tmp_path / "fits", *SIZES)
  budget = kvjax.Tokens(KEPT)
  for level in ("model", "layer"):
    with pytest.raises(InputError, match="with level=head, each has its own"):
      kvjax.get_plan(
        f"kvzap:gate={gate}:level={level}", budget, schedule=schedule
      )
  narrow = write_kvzap(tmp_path / "narrow", 8, KV_HEADS, 1, HIDDEN)
  plan = kvjax.get_plan(
    f"kvzap:gate={narrow}:level=head", budget, schedule=schedule
  )
  match = "reads inputs of 8 numbers, and this model's have 32"
  prompts = kvjax.Prompts.of(ROWS)
  with pytest.raises(InputError, match=match):
    kvjax.prefill(MODEL, PARAMS, prompts, plan)
  if schedule.every:
    kept = kvjax.get_plan("full", kvjax.Retention(1), decoding=plan)
    with pytest.raises(InputError, match=match):
      kvjax.prefill(MODEL, PARAMS, prompts, kept)
    with pytest.raises(InputError, match="always keeps the last 13 tokens"):
      kvjax.get_plan(
        f"kvzap:gate={gate}:level=head:recent=13", budget, schedule=schedule
      )


def test_each_plan_reads_its_own_gate(tmp_path):
  """Programs know both by the same method, as they know no files."""
  one = write_kvzap(tmp_path / "one", *SIZES)
  other = write_kvzap(tmp_path / "other", *SIZES)
  tensors = kvzap_tensors(*SIZES, seed=3)
  safetensors.numpy.save_file(tensors, tmp_path / "other" / "model.safetensors")

  def kept(plan):
    cache, _ = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
    return [kept_positions(cache, row) for row in range(len(ROWS))], cache

  alone, _ = kept(gated(one))
  both, cache = kept(gated(one, decoding=gated(other, every=EVERY)))
  assert both == alone != kept(gated(other))[0]
  # What is remembered is the other's.
  for row, heads in enumerate(np.asarray(cache.layers[0].remembered)):
    scores = kvzap_scores(ROWS[row], seed=3)
    for head, found in enumerate(heads):
      expected = scores[head][both[row][0][head]]
      np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_inputs_is_refused_in_one_sentence(tmp_path):
  class Blind(Placed):
    def block(self, weights, spec, hidden, shared, positions, attend):
      def without(activations):
        return attend(dataclasses.replace(activations, inputs=None))

      return super().block(weights, spec, hidden, shared, positions, without)

  model = Blind(MODEL.geometry)
  gate = write_kvzap(tmp_path, *SIZES)
  for schedule in ({}, {"block": 8}, {"every": EVERY}):
    plan = gated(gate, **schedule)
    with pytest.raises(InputError, match="reads inputs, which this model does"):
      kvjax.prefill(model, PARAMS, kvjax.Prompts.of(ROWS), plan)


def test_a_cache_whose_gate_has_become_another_models_is_refused(tmp_path):
  gate = write_kvzap(tmp_path, *SIZES)
  plan = gated(gate, every=EVERY)
  cache, logits = kvjax.prefill(MODEL, PARAMS, kvjax.Prompts.of(ROWS), plan)
  write_kvzap(tmp_path, WIDTH, KV_HEADS, 2, HIDDEN)
  with pytest.raises(InputError, match="is of another model: it scores 2 KV"):
    kvjax.generate(MODEL, PARAMS, cache, logits, kvjax.Decoding(4), keep=True)


@pytest.mark.parametrize("name", ["kvzap", "rerotate/kvzap", "kvzip"])
def test_turns_of_a_conversation_stay_within_the_budget(name, tmp_path):
  gate = write_kvzap(tmp_path, *SIZES)
  later = name if name != "kvzip" else "kvzap"
  schedule = kvjax.Schedule(every=EVERY)
  own = f"{later}:gate={gate}:level=head"
  if name == "kvzip":
    decoding = kvjax.get_plan(own, KEPT, schedule=schedule)
    plan = kvjax.get_plan("kvzip:level=head", 20, decoding=decoding)
  else:
    plan = kvjax.get_plan(own, KEPT, schedule=schedule)
  request = kvjax.RepeatRequest(first=(8, 9), later=(9, 8), suffix=(7,))
  prompts = kvjax.Prompts.of(ROWS, 64, repeat_request=request)
  cache, _ = kvjax.prefill(MODEL, PARAMS, prompts, plan)
  for _ in range(2):
    cache = kvjax.reserve(cache, 20)
    asked = kvjax.Prompts.of(ASKED, 8)
    answers = kvjax.generate(
      MODEL, PARAMS, cache, asked, kvjax.Decoding(9), keep=True
    )
    cache = answers.cache
    assert (np.asarray(cache.lengths) == KEPT).all()


def test_heads_of_queries_have_the_scores_of_their_group(tmp_path):
  gate = write_kvzap(tmp_path, *SIZES)
  for schedule in (kvjax.Schedule(block=8), kvjax.Schedule(every=EVERY)):
    kept = [
      kept_positions(
        kvjax.prefill(
          MODEL,
          PARAMS,
          kvjax.Prompts.of(ROWS),
          kvjax.get_plan(
            f"kvzap:gate={gate}:level=head",
            KEPT,
            schedule=schedule,
            per_query_head=each,
          ),
        )[0],
        0,
      )[0]
      for each in (False, True)
    ]
    assert kept[1] == [head for head in kept[0] for _ in range(2)]
