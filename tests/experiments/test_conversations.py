"""Turns that stay in the cache: what the next ones see, and what is held."""

import numpy as np
import pytest

import kvjax
from kvjax.experiments.benchmarks.base import Request
from kvjax.experiments.benchmarks.multiturn import generator
from kvjax.experiments.benchmarks.registry import BENCHMARKS
from kvjax.experiments.run import answering
from kvjax.experiments.run.answering import Seconds
from kvjax.experiments.run.candidates import candidates
from kvjax.experiments.run.prompting import Prompt, Shape
from kvjax.experiments.run.results import Part

# Positions are those of the tiny model, its transcripts' width.
TURNS, KEPT, ANSWER, POSITIONS = 3, 40, 16, 512
METHOD = "streaming:sinks=2"


@pytest.fixture(scope="module")
def talks(tiny):
  """The prompts of two conversations."""
  drawn = generator.samples([320], TURNS, 2, 0, tiny.tokenizer, "own")
  prompts = [
    Prompt.of_sample(tiny.tokenizer, sample)
    for sample in drawn[Part("niah_multiturn_own", 320)]
  ]
  return [prompts[:TURNS], prompts[TURNS:]]


@pytest.fixture(scope="module")
def replies(tiny, talks):
  """Of the full cache and one that evicts, by conversation and turn."""
  again = kvjax.Schedule(every=ANSWER)
  chosen = candidates([METHOD], [kvjax.Tokens(KEPT)], again)
  shape = Shape.of([prompt for prompts in talks for prompt in prompts], 2)
  found = answering.replies(tiny, chosen, talks, shape, Seconds())
  return {
    (reply.candidate.method, reply.row, reply.turn): reply
    for group in found
    for reply in group
  }


def test_conversations_of_more_turns_are_others(tiny):
  """They share no folder, as their needles do not lie in the same texts."""
  drawn = [
    BENCHMARKS["multiturn"].draw(
      tiny, Request(lengths=[480], samples=1, options={"turns": turns})
    )
    for turns in (2, 3)
  ]
  contexts = [next(iter(each.samples.values()))[0].context for each in drawn]
  assert contexts[0] != contexts[1]
  assert [each.data["turns"] for each in drawn] == ["2", "3"]


def of(replies, method):
  """The replies of each conversation, turn by turn."""
  return [[replies[method, row, n] for n in range(TURNS)] for row in range(2)]


@pytest.mark.slow
def test_a_turn_is_answered_after_all_that_was_said(tiny, talks, replies):
  """Each again from scratch, from one prompt with the answers before it."""
  decoding = kvjax.Decoding(ANSWER, tiny.tokenizer.eos_ids)
  plan = kvjax.get_plan("full", kvjax.Retention(1.0))
  for prompts, own in zip(talks, of(replies, "full"), strict=True):
    said = list(prompts[0].context)
    for prompt, reply in zip(prompts, own, strict=True):
      said += prompt.question
      row = kvjax.Prompts.of([said], POSITIONS)
      cache, logits = kvjax.prefill(tiny.model, tiny.params, row, plan)
      answers = kvjax.generate(tiny.model, tiny.params, cache, logits, decoding)
      assert answers.rows() == [reply.tokens]
      said += reply.tokens
      assert reply.context_tokens == reply.kept_tokens == len(said)


@pytest.mark.slow
def test_what_evicts_again_holds_its_budget_after_each_turn(talks, replies):
  for prompts, own in zip(talks, of(replies, METHOD), strict=True):
    seen = len(prompts[0].context) + np.cumsum(
      [
        len(prompt.question) + len(reply.tokens)
        for prompt, reply in zip(prompts, own, strict=True)
      ]
    )
    assert [reply.context_tokens for reply in own] == seen.tolist()
    assert [reply.kept_tokens for reply in own] == [KEPT] * TURNS
    assert [reply.read_tokens for reply in own] == [KEPT] * TURNS
    shares = [reply.retention for reply in own]
    np.testing.assert_allclose(shares, KEPT / seen)
