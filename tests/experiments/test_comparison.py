"""Answering: shared prefills, few shapes, resumed runs, both modes."""

import dataclasses

import jax
import numpy as np
import pytest
from comparing import compare
from made_runs import MEASURED

import kvjax
from kvjax import models
from kvjax.cache.sharding import parse_mesh
from kvjax.errors import InputError
from kvjax.experiments.metrics.string_match import clean
from kvjax.experiments.run import answering, batching, comparison, prompting
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.results import Part, Results, Settings
from kvjax.experiments.tasks.sample import Sample

SETTINGS = Settings("tiny", "abc", "float32", 0)
NAMES = [
  "full",
  "streaming",
  "keydiff",
  "snapkv:window=4",
  # Its layers keep different numbers of tokens.
  "key_norm:skip_layers=0",
]
CHOSEN = candidates(NAMES, [kvjax.Retention(1.0), kvjax.Retention(0.5)])
SENTENCE = " The grass is green and the sky is blue."


def a_sample(task, number):
  return Sample(
    context=f"Number {number}." + SENTENCE * (3 + number % 3) + "\n",
    question="What is green?" + " Why?" * (number % 2),
    answer_prefix=" It is",
    answers=("the", "grass"),
    task=task,
    max_new_tokens=5,
    metadata={},
  )


SAMPLES = {
  Part("one", 128): [a_sample("one", number) for number in range(3)],
  Part("two", 128): [a_sample("two", number) for number in range(3, 6)],
}


def assert_same(answer, expected):
  """Answers are equal, but for their shares of what a batch has once.

  That is a few numbers, such as the step of its loop.
  """
  assert answer.decoding_bytes == pytest.approx(expected.decoding_bytes, abs=8)
  bytes_of = {"decoding_bytes": expected.decoding_bytes}
  assert dataclasses.replace(answer, **bytes_of) == expected


@pytest.fixture
def counted(monkeypatch):
  """How often prompts are prefilled and caches asked.

  Only caches of equal sizes are asked together: the limit of this small model's
  weights would join almost all.
  """
  monkeypatch.setattr(answering, "tree_bytes", lambda params: 0)
  calls = {"sweep": 0, "generate": 0}

  def count(name, function):
    def call(*args, **kwargs):
      calls[name] += 1
      return function(*args, **kwargs)

    monkeypatch.setattr(kvjax, name, call)

  count("sweep", kvjax.sweep)
  count("generate", kvjax.generate)
  return calls


def compared(lm, folder, on_answers=lambda task, new: None, **changes):
  arguments = {"chosen": CHOSEN, "samples": SAMPLES, "batch": 2} | changes
  results = Results(folder, SETTINGS)
  compare(
    lm,
    arguments["chosen"],
    arguments["samples"],
    results,
    arguments["batch"],
    on_answers,
    arguments.get("protocol", "query-agnostic"),
  )
  return results


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
  # As in `counted`: answers are written in the order of groups of caches.
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(answering, "tree_bytes", lambda params: 0)
    return compared(tiny, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_every_candidate_answers_every_sample(whole):
  assert set(whole.records) == set(comparison.wanted(CHOSEN, SAMPLES))
  assert len(whole.records) == 6 * len(CHOSEN)


def test_kept_tokens_are_those_of_the_cache(whole):
  for answer in whole.records.values():
    whole_length = answer.context_tokens
    half = -(-whole_length // 2)
    expected = {"full": whole_length, NAMES[-1]: (whole_length + half) / 2}
    assert answer.kept_tokens == expected.get(answer.method, half)
    assert answer.retention == (1.0 if answer.method == "full" else 0.5)
  full = max(a.cache_bytes for a in whole.records.values())
  half = min(a.cache_bytes for a in whole.records.values())
  assert 0.45 < half / full < 0.55


def test_a_batch_is_prefilled_once_and_equal_caches_asked_together(
  tiny, tmp_path, counted
):
  compared(tiny, tmp_path)
  # Six contexts in batches of two, one with both tasks; full, half and unequal
  # caches.
  assert counted == {"sweep": 3, "generate": 9}


@pytest.mark.slow
def test_a_sweep_answers_as_each_of_its_methods_does_alone(
  tiny, tmp_path, whole
):
  """Two caches that are joined, a packed one and one that is retrieved from.

  All that is written of an answer is the same. So it is, but for what padding
  takes, among other methods and samples; and by hand.
  """
  half, quarter = kvjax.Retention(0.5), kvjax.Retention(0.25)
  swept = [
    *candidates(["keydiff"], [half, quarter])[1:],
    *candidates(["snapkv:window=4", "adakv"], [quarter])[1:],
    *candidates(["flat"], [half])[1:],
  ]
  part = Part("one", 128)
  sample = SAMPLES[part][0]

  def asked(folder, chosen):
    return compared(
      tiny, tmp_path / folder, chosen=chosen, samples={part: [sample]}
    ).records

  together = asked("sweep", swept)
  alone = {}
  for number in (2, 3, 4):
    alone |= asked(str(number), swept[number : number + 1])
  assert len(together) == 5
  for key, answer in alone.items():
    assert_same(together[key], answer)
  (first,) = (a for a in together.values() if a.key in whole.records)
  among = whole.records[first.key]
  assert_same(dataclasses.replace(among, cache_bytes=first.cache_bytes), first)

  prompt = prompting.Prompt.of_sample(tiny.tokenizer, sample)
  shape = prompting.Shape.of([prompt], 1)
  (cache,), _ = kvjax.sweep(
    tiny.model,
    tiny.params,
    kvjax.Prompts.of([prompt.context], shape.context),
    [swept[2].plan],
  )
  answers = kvjax.generate(
    tiny.model,
    tiny.params,
    cache,
    kvjax.Prompts.of([prompt.question], shape.question),
    kvjax.Decoding(5, tiny.tokenizer.eos_ids),
  )
  (ids,) = answers.rows()
  third, *_ = alone.values()
  assert third.prediction == tiny.tokenizer.decode(ids)
  assert third.kept_tokens == np.mean(np.asarray(cache.lengths))
  before, after = tiny.tokenizer.split_chat(sample.context)
  texts = before, sample.question + after + sample.answer_prefix
  assert (prompt.context, prompt.question) == tuple(
    map(tiny.tokenizer.encode, texts)
  )


def test_a_stopped_run_goes_on_where_it_stopped(tiny, tmp_path, whole, counted):
  told = []

  def stop_at_fourth(task, new):
    told.append(new)
    if len(told) == 4:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    compared(tiny, tmp_path, stop_at_fourth)
  assert counted == {"sweep": 2, "generate": 4}
  results = compared(tiny, tmp_path, lambda task, new: told.append(new))
  # The second batch, which has both tasks, again for its other groups.
  assert told == [2, 2, 6, 1, 1, 1, 3, 3, 2, 2, 6]
  assert results.records == whole.records
  lines = (tmp_path / "samples.jsonl").read_bytes().splitlines()
  expected = (whole.folder / "samples.jsonl").read_bytes().splitlines()
  assert lines == expected
  before = dict(counted)
  compared(tiny, tmp_path)
  assert counted == before


def test_only_what_is_new_is_asked(tiny, tmp_path, monkeypatch):
  asked = []

  def replies(lm, chosen, prompts, shape, seconds):
    asked.append(([c.method for c in chosen], len(prompts)))
    rows = range(len(prompts))
    yield [
      answering.Reply(c, row, 0, [], "", **MEASURED)
      for c in chosen
      for row in rows
    ]

  monkeypatch.setattr(comparison, "replies", replies)
  first = {part: drawn[:2] for part, drawn in SAMPLES.items()}
  compared(tiny, tmp_path, chosen=CHOSEN[:2], samples=first)
  assert asked == [(["full", "streaming"], 2)] * 2
  asked.clear()
  compared(tiny, tmp_path, chosen=CHOSEN[:3], samples=first)
  assert asked == [(["keydiff"], 2)] * 2
  asked.clear()
  compared(tiny, tmp_path, chosen=CHOSEN[:3])
  assert asked == [(["full", "streaming", "keydiff"], 2)]


def test_answers_of_other_lengths_have_batches_of_their_own(
  tiny, tmp_path, counted
):
  (part, drawn), (other, others) = SAMPLES.items()
  longer = [dataclasses.replace(s, max_new_tokens=9) for s in others]
  samples = {part: drawn[:1], other: longer[:1]}
  results = compared(tiny, tmp_path, chosen=CHOSEN[:1], samples=samples)
  assert counted["sweep"] == 2
  most = {key.part: each.answer_tokens for key, each in results.records.items()}
  assert most[part] <= drawn[0].max_new_tokens < 9
  assert drawn[0].max_new_tokens < most[other] <= 9


def test_a_prompt_longer_than_the_context_is_refused(tiny, tmp_path):
  long = dataclasses.replace(
    SAMPLES[Part("one", 128)][0], context=SENTENCE * 80
  )
  with pytest.raises(InputError, match=r"come to 8\d\d tokens; the context of"):
    compared(tiny, tmp_path / "new", samples={Part("one", 128): [long]})
  assert not (tmp_path / "new").exists()


def test_turns_that_stay_must_fit_the_context_together(tiny, tmp_path):
  part = Part("one", 128)
  turn = dataclasses.replace(
    SAMPLES[part][0], question=SENTENCE * 24, stays=True
  )
  turns = [turn, dataclasses.replace(turn, question=SENTENCE * 25)]
  with pytest.raises(InputError, match=r"10\) come to 5\d\d tokens"):
    compared(tiny, tmp_path / "new", samples={part: turns})
  assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_mesh_changes_no_answer(tiny_directory, tmp_path, whole):
  mesh = parse_mesh("data:2,model:2")
  with jax.set_mesh(mesh):
    sharded = models.load(tiny_directory, "float32", mesh)
    results = compared(sharded, tmp_path, chosen=CHOSEN[:2])
  assert len(results.records) == 12
  for key, answer in results.records.items():
    assert_same(answer, whole.records[key])


@pytest.mark.slow
def test_a_question_may_be_prefilled_too(tiny, tmp_path):
  """As by hand, row by row: the whole prompt, then what follows it."""
  chosen = candidates(["flat:sinks=1:local=4"], [kvjax.Tokens(6)])
  samples = {Part("one", 128): SAMPLES[Part("one", 128)][:2]}
  found = compared(
    tiny,
    tmp_path,
    chosen=chosen,
    samples=samples,
    batch=1,
    protocol="query-aware",
  ).records
  decoding = kvjax.Decoding(5, tiny.tokenizer.eos_ids)
  for sample in samples[Part("one", 128)]:
    prompt = prompting.Prompt.of_sample(tiny.tokenizer, sample)
    # As wide as there, for the same compiled programs.
    width = prompting.Shape.of([prompt], 1, "query-aware").context
    rows = kvjax.Prompts.of([prompt.prefilled], width)
    plans = [candidate.plan for candidate in chosen]
    caches, logits = kvjax.sweep(tiny.model, tiny.params, rows, plans)
    for candidate, cache in zip(chosen, caches, strict=True):
      (key,) = (
        key
        for key in found
        if (key.method, key.asked) == (candidate.method, sample.digest)
      )
      (ids,) = kvjax.generate(
        tiny.model, tiny.params, cache, logits, decoding
      ).rows()
      said = clean(tiny.tokenizer.decode(ids))
      assert clean(found[key].prediction) == said
      assert found[key].read_tokens == np.mean(np.asarray(cache.num_attended))
      assert found[key].kept_tokens == len(prompt.prefilled)


@pytest.mark.slow
def test_questions_about_one_context_share_its_prefill(tiny, tmp_path, counted):
  """Each sees the cache as the context left it, whatever was asked before."""
  first = SAMPLES[Part("one", 128)][0]
  same = [
    dataclasses.replace(first, question=question)
    for question in ("What is green?", "Why?", "What is blue?")
  ]
  other = a_sample("one", 1)
  part = Part("one", 128)
  chosen = CHOSEN[:2]
  together = compared(
    tiny, tmp_path / "a", chosen=chosen, samples={part: [*same, other]}
  ).records
  # Full and half caches; three questions, of which the second row has one.
  assert counted == {"sweep": 1, "generate": 6}
  assert len(together) == 4 * len(chosen)
  apart = {}
  for number, sample in enumerate([*same, other]):
    found = compared(
      tiny, tmp_path / str(number), chosen=chosen, samples={part: [sample]}
    ).records
    apart |= found
  for key, answer in together.items():
    alone = apart[key]
    assert answer.prediction == alone.prediction
    assert (answer.question, answer.kept_tokens) == (
      alone.question,
      alone.kept_tokens,
    )


def test_contexts_of_unlike_lengths_are_padded_apart():
  def context(tokens):
    prompt = prompting.Prompt([5] * tokens, [5] * 4, 2)
    sample = a_sample("t", 0)
    return batching.Context(Part("t", 0), [0], [sample], [prompt])

  lengths = [4000, 3100, 2900, 1500, 1300, 900]
  groups = batching._by_length([context(n) for n in lengths])
  found = [[len(c.prompts[0].context) for c in group] for group in groups]
  # A quarter shorter at most, or 256 tokens.
  assert found == [[4000, 3100], [2900], [1500, 1300], [900]]


def test_a_prompt_may_go_without_the_chat_template(tiny):
  sample = dataclasses.replace(a_sample("one", 0), chat=False)
  tokenizer = tiny.tokenizer
  prompt = prompting.Prompt.of_sample(tokenizer, sample)
  assert prompt.context == tokenizer.encode(tokenizer.bos + sample.context)
  assert prompt.question == tokenizer.encode("What is green? It is")


@pytest.mark.slow
def test_query_heads_decide_and_store_for_themselves(tiny, tmp_path, whole):
  """Two query heads share a KV head of the tiny model: twice the bytes."""
  half = [kvjax.Retention(0.5)]
  chosen = candidates(["keydiff"], half, per_query_head=True)
  found = compared(tiny, tmp_path, chosen=chosen).records
  assert len(found) == 12
  for key, answer in found.items():
    grouped = whole.records[key]
    assert answer.kept_tokens == grouped.kept_tokens
    assert 1.9 < answer.cache_bytes / grouped.cache_bytes < 2.1
    if answer.method == "full":
      assert answer.prediction == grouped.prediction


def test_a_budget_below_what_is_protected_is_refused_at_first(tiny, tmp_path):
  answered = Results(tmp_path, SETTINGS)
  sample = Sample("one two three four", "?", "", ("1",), "t", 4, {})
  chosen = candidates(["keydiff"], [kvjax.Tokens(2)])
  samples = {Part("t", 8): [sample]}
  found = comparison.pending(tiny, chosen, samples, answered, 1)
  assert found.missing
  samples = {Part("t", 8): [dataclasses.replace(sample, protected=True)]}
  with pytest.raises(InputError, match=r"protected and 2 may be kept"):
    comparison.pending(tiny, chosen, samples, answered, 1)
