"""The needle tasks: what they hold, how long they are, how they are scored."""

import dataclasses
import random
import re

import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.experiments.metrics.string_match import string_match_all
from kvjax.experiments.reference import vocabulary
from kvjax.experiments.tasks import fitting, niah, passkey, prose, suite, words
from kvjax.experiments.tasks.sample import Sample

TOKENIZER = vocabulary.build()


def count(text):
  return len(TOKENIZER.encode(text, add_special_tokens=False).ids)


def draw(task, seed=0, length=640):
  return suite.draw(task, 0, seed, length, count)


def prompt_tokens(sample):
  prompt = sample.question + sample.answer_prefix
  return count(sample.context) + count(prompt) + sample.max_new_tokens


@pytest.mark.parametrize("task", suite.TASKS)
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_stands_once_in_the_context(task, seed):
  sample = draw(task, seed)
  times = 2 if task == "passkey" else 1
  for answer in sample.answers:
    assert sample.context.count(answer) == times
    assert answer not in sample.question + sample.answer_prefix


@pytest.mark.parametrize("task", suite.TASKS)
@pytest.mark.parametrize("length", [640, 1000])
def test_the_prompt_fills_the_length_up_to_one_unit(task, length):
  sample = draw(task, length=length)
  # The largest unit is a needle of UUIDs; other needles are 22 tokens, and
  # the noise is 30.
  unit = 95 if task == "niah_multikey_3" else 40
  assert length - unit < prompt_tokens(sample) <= length


@pytest.mark.parametrize("task", suite.TASKS)
def test_equal_seeds_give_equal_samples(task):
  assert draw(task, seed=5) == draw(task, seed=5)
  assert draw(task, seed=5).context != draw(task, seed=6).context


@pytest.mark.parametrize("task", niah.TASKS)
def test_a_search_of_the_context_finds_every_answer(task):
  sample = draw(task)
  found = [
    value
    for key in sample.metadata["keys"]
    for value in re.findall(
      rf"for {re.escape(key)} is: ([0-9a-f-]+)\.", sample.context
    )
  ]
  assert found == list(sample.answers)
  assert all(key in sample.question for key in sample.metadata["keys"])
  assert string_match_all(niah.listing(found), sample.answers) == 1


def test_the_wording_is_the_one_of_ruler():
  single = draw("niah_single_1")
  key = single.metadata["keys"][0]
  assert single.context.startswith(
    "A special magic number is hidden within the following text. Make sure "
    "to memorize it. I will quiz you about the number afterwards.\n"
  )
  assert single.question + single.answer_prefix == (
    f"What is the special magic number for {key} mentioned in the provided "
    f"text? The special magic number for {key} mentioned in the provided "
    "text is"
  )
  many = draw("niah_multiquery")
  query = niah.listing(many.metadata["keys"])
  assert many.question.startswith("What are all the special magic numbers")
  assert f"for {query} mentioned" in many.question
  assert ", and " in query
  assert many.answer_prefix.endswith("provided text are")
  assert len(many.answers) == len(draw("niah_multivalue").answers) == 4


def test_a_passkey_stands_where_it_was_asked_to():
  def at(depth):
    sample = passkey.passkey(random.Random(0), 640, count, depth=depth)
    return sample.context.index(sample.answers[0]) / len(sample.context)

  assert at(0.0) < 0.2 < at(0.5) < 0.7 < at(1.0)


def test_a_needle_stands_where_it_was_asked_to():
  def at(depth):
    task = niah.TASKS["niah_single_2"]
    sample = niah.sample(task, random.Random(0), 640, count, depths=[depth])
    haystack = sample.context[len(niah.INTRO_ONE.format(kind="number")) :]
    before, after = haystack.split(sample.answers[0])
    return before.count(" "), after.strip(". \n")

  assert at(0.0)[0] == 9  # those of the needle
  assert 0.4 < at(0.5)[0] / at(1.0)[0] < 0.6
  assert at(1.0)[1] == ""


@pytest.mark.parametrize("length", [640, 1024])
def test_a_conversation_asks_for_every_key_of_one_context(length):
  task = niah.NeedleTask("talk", "essay", key_count=6, max_new_tokens=16)
  turns = niah.conversation(task, random.Random(2), length, count)
  assert len(turns) == 6
  assert len({turn.context for turn in turns}) == 1
  context = turns[0].context
  found = dict(re.findall(r"for (\S+) is: (\d{7})\.", context))
  assert {t.metadata["keys"][0]: t.answers[0] for t in turns} == found
  for turn in turns:
    assert f"number for {turn.metadata['keys'][0]} mentioned" in turn.question
  asked = [context.index(turn.answers[0]) for turn in turns]
  assert asked != sorted(asked)
  gaps = np.diff([0, *sorted(asked), len(context)]) / len(context)
  assert gaps.max() < 2 / 6
  total = count(context) + sum(
    count(turn.question) + count(turn.answer_prefix) + 16 for turn in turns
  )
  assert length - 40 < total <= length


@pytest.mark.parametrize("task", suite.TASKS)
def test_a_length_too_short_is_refused_with_the_length_that_is_not(task):
  with pytest.raises(InputError, match=r"it needs at least \d+") as refused:
    draw(task, length=100)
  least = int(re.findall(r"\d+", str(refused.value))[-1])
  assert prompt_tokens(draw(task, length=least)) == least


def test_held_out_prose_is_not_training_prose():
  train, heldout = prose.sentences("train"), prose.sentences("heldout")
  # A haystack of 2,000 tokens has about 1,000 words.
  assert sum(len(sentence.split()) for sentence in heldout) > 5000
  assert not set(train) & set(heldout)


def test_prose_is_of_the_asked_number_of_words_and_wraps_round():
  text = fitting.ProseText(random.Random(0), "heldout")
  for number in (1, 100, 20_000):
    joined = " ".join(text.sentences(number))
    assert len(joined.split(" ")) == number


def test_key_words_are_distinct_and_one_token_each():
  assert len(set(words.ADJECTIVES)) == len(words.ADJECTIVES)
  assert len(set(words.NOUNS)) == len(words.NOUNS)
  for adjective, noun in zip(words.ADJECTIVES, words.NOUNS, strict=False):
    assert count(f" {adjective}-{noun}") == 3


def decoded(text):
  ids = TOKENIZER.encode(text, add_special_tokens=False).ids
  return TOKENIZER.decode(ids, skip_special_tokens=False)


def test_the_tokenizer_loses_nothing():
  rng = random.Random(0)
  for _ in range(300):
    text = "".join(
      chr(
        rng.choice(
          [
            rng.randrange(128),
            rng.randrange(0xD800),
            rng.randrange(0xE000, 0x110000),
          ]
        )
      )
      for _ in range(40)
    )
    assert decoded(text) == text
  for part in ("train", "heldout"):
    text = "\n".join(prose.sentences(part))
    assert decoded(text) == text


def test_symbols_of_values_are_one_token_each():
  assert count(" 1234567") == 8
  # Of letters that spell words, too.
  assert count(" bedface0-dead-4add-8bad-fadedbeef012") == 37
  assert count(" be4dcafe-bead-4fad-8bad-deadbeef0123") == 37


def test_known_words_are_one_token_and_others_are_bytes():
  assert count(" the") == 1
  assert count(" quizzaciously") == len(" quizzaciously")
  assert TOKENIZER.get_vocab_size() == vocabulary.SIZE


def test_what_a_scorer_reads_is_there_before_a_model_answers():
  fields = ("context", "question", "", ("answer",), "task", 8)
  known = Sample(*fields, {"words": 3}, scored_by=("words",))
  with pytest.raises(ValueError, match=r"task is scored by shade, which its m"):
    dataclasses.replace(known, scored_by=("words", "shade"))
