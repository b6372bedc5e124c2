"""The question in the compressed context, as in kvpress 0.5.5's evaluation.

tests/golden/make_kvpress_query_aware.py makes the golden file.
"""

import dataclasses
import json
import pathlib

import pytest
from comparing import compare
from fetching import located

import kvjax
from kvjax.experiments.metrics.string_match import clean
from kvjax.experiments.run import side_by_side
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.prompting import (
  QUERY_AGNOSTIC,
  QUERY_AWARE,
  QUERY_AWARE_KVPRESS,
  Prompt,
)
from kvjax.experiments.run.results import Part, Results, Settings
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import load

MODEL = "smollm2-135m-instruct"
GOLDEN = json.loads(
  (
    pathlib.Path(__file__).parents[1] / "golden" / "kvpress_query_aware.json"
  ).read_text()
)["samples"]
# Our names of the presses.
METHODS = {
  "keydiff": "keydiff",
  "snapkv": "snapkv.kvpress",
  "knorm": "key_norm",
}
SENTENCE = " The grass is green and the sky is blue."


@pytest.fixture(scope="module")
def smollm2():
  return load(located(MODEL))


def golden_sample(number):
  texts = GOLDEN[number]
  return Sample(
    context=texts["context"],
    question=texts["question"],
    answer_prefix=texts["answer_prefix"],
    answers=("no reference",),
    task="codes",
    max_new_tokens=12,
    metadata={},
  )


def a_sample(number, **changes):
  sample = Sample(
    context=f"Number {number}." + SENTENCE * (3 + number) + "\n",
    question="What is green?" + " Why?" * number,
    answer_prefix=" It is",
    answers=("the", "grass"),
    task="one",
    max_new_tokens=5,
    metadata={},
  )
  return dataclasses.replace(sample, **changes)


def answered(lm, folder, samples, chosen, protocol):
  """The answers by the number of their sample and their method."""
  results = Results(folder, Settings("tiny", "abc", "float32", 0))
  part = Part("one", 128)
  compare(
    lm, chosen, {part: samples}, results, 2, lambda task, new: None, protocol
  )
  return {(a.sample, a.method): a for a in results.records.values()}


@pytest.mark.slow
def test_the_prompt_is_split_as_by_the_pipeline_of_kvpress(smollm2):
  for number, golden in enumerate(GOLDEN):
    known = golden_sample(number).with_question_in_context()
    prompt = Prompt.of_sample(smollm2.text, known)
    assert prompt.context == golden["context_ids"]
    assert prompt.question == golden["question_ids"]


@pytest.mark.slow
def test_caches_answer_as_those_of_kvpress(smollm2, tmp_path):
  for number, golden in enumerate(GOLDEN):
    half = kvjax.Tokens(len(golden["context_ids"]) // 2)
    chosen = candidates(list(METHODS.values()), [half])
    found = answered(
      smollm2,
      tmp_path / str(number),
      [golden_sample(number)],
      chosen,
      QUERY_AWARE_KVPRESS,
    )
    for press, method in METHODS.items():
      assert clean(found[0, method].prediction) == clean(
        golden["answers"][press]
      )


@pytest.mark.slow
def test_it_is_the_question_at_the_end_of_the_context(tiny, tmp_path):
  """The records keep the question, which identifies a sample in all runs."""
  chosen = candidates(["snapkv:window=4"], [kvjax.Retention(0.5)])
  samples = [a_sample(number) for number in range(3)]
  known = [sample.with_question_in_context() for sample in samples]
  found = answered(tiny, tmp_path / "a", samples, chosen, QUERY_AWARE_KVPRESS)
  same = answered(tiny, tmp_path / "b", known, chosen, QUERY_AGNOSTIC)
  assert found.keys() == same.keys()
  assert len(found) == 6
  for key, answer in found.items():
    sample = samples[key[0]]
    assert answer.question == sample.question
    assert answer.asked == sample.digest
    prompt = Prompt.of_sample(tiny.text, sample.with_question_in_context())
    assert answer.context_tokens == len(prompt.context)
    assert answer == dataclasses.replace(
      same[key], question=sample.question, asked=sample.digest
    )


@pytest.mark.slow
def test_questions_about_one_context_are_compressed_apart(tiny, tmp_path):
  chosen = candidates(["streaming:sinks=1"], [kvjax.Retention(0.5)])
  samples = [a_sample(0), a_sample(0, question="Why? Who is it?")]
  found = answered(tiny, tmp_path, samples, chosen, QUERY_AWARE_KVPRESS)
  lengths = [found[n, "streaming:sinks=1"].context_tokens for n in (0, 1)]
  for sample, length in zip(samples, lengths, strict=True):
    known = Prompt.of_sample(tiny.text, sample.with_question_in_context())
    assert length == len(known.context)


@pytest.mark.slow
def test_nothing_need_follow_the_question(tiny, tmp_path):
  """Then it is the whole prompt, as for LongBench's lsht without template."""
  chosen = candidates(["streaming:sinks=1"], [kvjax.Retention(0.5)])
  bare = a_sample(1, answer_prefix="", chat=False)
  samples = [bare, a_sample(2)]
  found = answered(tiny, tmp_path / "a", samples, chosen, QUERY_AWARE_KVPRESS)
  whole = answered(tiny, tmp_path / "b", [bare], chosen, QUERY_AWARE)
  assert len(found) == 4
  for (number, method), answer in whole.items():
    assert found[number, method].prediction == answer.prediction
    assert found[number, method].kept_tokens == answer.kept_tokens


def test_a_text_is_compressed_with_its_question(tiny):
  chosen = candidates(["full"], [kvjax.Retention(1.0)])
  text = "Ann called." + SENTENCE * 3 + "\n"
  prompt, _ = side_by_side.answer_question(
    tiny, chosen, text, "Who called?", QUERY_AWARE_KVPRESS
  )
  _, suffix = tiny.text.split_chat("")
  assert tiny.text.decode(prompt.context).endswith("Who called?")
  assert prompt.question == tiny.text.encode(suffix)
