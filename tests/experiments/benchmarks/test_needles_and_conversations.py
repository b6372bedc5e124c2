"""Needles, passkeys and conversations: an oracle, depths, lengths, seeds."""

import functools
import re

import pytest

from kvjax import models
from kvjax.experiments.benchmarks.multiturn import generator
from kvjax.experiments.benchmarks.needle import definition as needle
from kvjax.experiments.metrics import registry
from kvjax.experiments.reference import vocabulary
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks import niah, passkey, prose
from kvjax.experiments.tasks.words import KeyWords

LENGTHS, DEPTHS = [640, 1500], [0.0, 0.3, 1.0]
TOKENIZER = models.Tokenizer(vocabulary.build(), vocabulary.config(2048))
DRAW = {"needle": needle.needle_samples, "passkey": needle.passkey_samples}
INTRO = {
  "needle": niah.INTRO_ONE.format(kind="number"),
  "passkey": passkey.INTRO,
}
LONGEST = max(map(len, prose.sentences("heldout")))


def count(text):
  """Tokens of a tokenizer that every text is the sum of its parts for."""
  return len(re.findall(r"\w+|[^\w\s]|\n", text))


def tokens(sample):
  texts = (sample.context, sample.question, sample.answer_prefix)
  return sum(map(count, texts)) + sample.max_new_tokens


def grid(task, seed=0, lengths=LENGTHS, depths=DEPTHS, samples=2):
  return DRAW[task](needle.Grid(lengths, depths, samples, seed, count))


def drawn_talks(history, seed=0, first_known=False):
  return generator.samples(
    LENGTHS, 5, 2, seed, TOKENIZER, history, first_known=first_known
  )


talks = functools.cache(drawn_talks)


def find(sample):
  """Where the context tells what is asked, without knowing the answer."""
  pattern = r"The pass key is (\d{64})\. Remember it\. \1 is the pass key\."
  if sample.task != "passkey":
    key = re.findall(r"for (\S+) mentioned in", sample.question)[-1]
    pattern = rf"One of the special magic numbers for {key} is: (\d{{7}})\."
  (found,) = re.finditer(pattern, sample.context)
  return found


def check_oracle(sample):
  found = find(sample)
  assert registry.score(sample, found[1])["score"] == 1
  assert registry.score(sample, found[0])["score"] == 1
  assert registry.score(sample, "")["score"] == 0
  assert found[1] not in sample.answer_prefix


@pytest.mark.parametrize("task", DRAW)
def test_a_grid_has_answers_at_every_length_and_depth(task):
  found = grid(task)
  assert list(found) == [Part(task, length) for length in LENGTHS]
  for part, drawn in found.items():
    assert [s.metadata["depth"] for s in drawn] == [0, 0, 0.3, 0.3, 1, 1]
    assert len({sample.answers for sample in drawn}) == len(drawn)
    for sample in drawn:
      check_oracle(sample)
      # A unit is a word with the full stop that may follow it.
      assert part.length - 4 < tokens(sample) <= part.length
      before, after = (
        sample.context[: find(sample).start()],
        sample.context[find(sample).end() :],
      )
      assert before.startswith(INTRO[task])
      share = len(before.removeprefix(INTRO[task])) / (
        len(before + after) - len(INTRO[task])
      )
      assert abs(share - sample.metadata["depth"]) < LONGEST / len(
        after + before
      )
      end = "" if task == "passkey" else "\n"
      assert {0.0: before == INTRO[task], 1.0: after == end}.get(
        sample.metadata["depth"], before[-2:] == ". "
      )


@pytest.mark.parametrize("task", DRAW)
def test_a_cell_is_the_same_in_every_grid(task):
  whole = grid(task, seed=3)
  cell = grid(task, seed=3, lengths=[640], depths=[0.3], samples=1)
  assert cell[Part(task, 640)] == whole[Part(task, 640)][2:3]
  assert grid(task, seed=4)[Part(task, 640)] != whole[Part(task, 640)]


@pytest.mark.parametrize("task", DRAW)
def test_versions_of_a_sample_share_an_origin_in_every_grid(task):
  """Numbers would tie a sample to another one where a grid has more."""
  small = grid(task, depths=[0.0, 1.0])
  large = grid(task, lengths=LENGTHS[1:], samples=3)
  drawn = [s for part in (*small.values(), *large.values()) for s in part]
  by_origin, by_answers = (
    {
      frozenset(n for n, s in enumerate(drawn) if of(s) == key)
      for key in set(map(of, drawn))
    }
    for of in (lambda s: s.origin, lambda s: s.answers)
  )
  assert by_origin == by_answers
  # Of nine, four have three versions.
  assert sorted(map(len, by_origin)) == [1] * 5 + [3] * 4


def test_what_scorers_read_is_recorded():
  for part in grid("passkey").values():
    assert all(sample.answers == (sample.key,) for sample in part)
  for part in grid("needle").values():
    assert {(sample.scored_by, sample.key) for sample in part} == {
      (("needle",), None)
    }
    assert all(s.answers[0] in s.metadata["needle"] for s in part)


def test_a_passkey_is_asked_for_without_the_chat_template():
  assert not any(s.chat for part in grid("passkey").values() for s in part)
  assert all(s.chat for part in grid("needle").values() for s in part)


def test_a_passkey_is_asked_for_in_the_official_words():
  drawn = grid("passkey", lengths=[640], depths=[0.3])[Part("passkey", 640)]
  for sample in drawn:
    assert sample.question + sample.answer_prefix == (
      "\nWhat is the pass key? The pass key is "
    )
    assert not sample.context.endswith("\n")
    assert sample.max_new_tokens == 256


def test_words_of_a_passkey_are_counted_in_tokens():
  length = passkey.length_of_words(20_000, count)
  (sample,) = grid("passkey", lengths=[length], depths=[1.0], samples=1)[
    Part("passkey", length)
  ]
  before = sample.context.removeprefix(passkey.INTRO)
  words = before[: find(sample).start() - len(passkey.INTRO)].split()
  assert len(words) == pytest.approx(20_000, rel=0.05)


def test_even_depths_go_from_end_to_end():
  assert needle.even_depths(5) == [0, 0.25, 0.5, 0.75, 1]
  assert needle.even_depths(1) == [0]


@pytest.mark.parametrize("history", generator.HISTORIES)
def test_every_turn_of_a_conversation_asks_for_another_needle(history):
  found = talks(history)
  task = f"niah_multiturn_{history}"
  assert list(found) == [Part(task, length) for length in LENGTHS]
  for part, drawn in found.items():
    assert [s.metadata["turn"] for s in drawn] == [*range(5), *range(5)]
    assert drawn[0].context != drawn[5].context
    for one in (drawn[:5], drawn[5:]):
      assert len({sample.context for sample in one}) == 1
      assert len({sample.answers for sample in one}) == 5
      places = [find(sample).start() for sample in one]
      assert places != sorted(places)
      for sample in one:
        check_oracle(sample)
    if history == "shared":
      asked = sum(map(tokenized, drawn[:5]))
      total = TOKENIZER.count(drawn[0].context) + asked
      assert part.length - 40 < total <= part.length


def tokenized(sample):
  asked = (
    TOKENIZER.count(sample.question),
    TOKENIZER.count(sample.answer_prefix),
  )
  return sum(asked) + sample.max_new_tokens


def test_a_conversation_has_the_right_answers_of_earlier_turns():
  part = Part("niah_multiturn_conversation", 640)
  drawn = talks("conversation")[part][:5]
  alone = talks("shared")[Part("niah_multiturn_shared", 640)][:5]
  assert drawn[0] == alone[0]
  for turn in range(1, 5):
    earlier, own = drawn[turn - 1], alone[turn]
    said = f"{earlier.answer_prefix} {earlier.answers[0]}"
    assert drawn[turn].question.startswith(earlier.question)
    assert drawn[turn].question.endswith(own.question)
    assert drawn[turn].question.count(said) == 1
    assert own.answers[0] not in drawn[turn].question
    assert (drawn[turn].answers, drawn[turn].context) == (
      own.answers,
      own.context,
    )


def test_turns_that_stay_make_the_same_conversation():
  """With the right answers between them, the last turn has all questions."""
  own = talks("own")[Part("niah_multiturn_own", 640)][:5]
  whole = talks("conversation")[Part("niah_multiturn_conversation", 640)][4]
  assert all(sample.stays for sample in own)
  assert not whole.stays
  _, suffix = TOKENIZER.split_chat("")
  said = "".join(
    sample.question + suffix + f"{sample.answer_prefix} {sample.answers[0]}"
    for sample in own[:4]
  )
  assert said + own[4].question == whole.question
  assert own[0].context == whole.context


@pytest.mark.parametrize("history", ["conversation", "own"])
def test_a_first_question_that_is_known_is_prefilled_and_asked_once(history):
  """All tokens are the same, the first question's among the context's."""
  part = Part(f"niah_multiturn_{history}", 640)
  pairs = zip(
    talks(history)[part], talks(history, first_known=True)[part], strict=True
  )
  for later, known in pairs:
    plain = Prompt.of_sample(TOKENIZER, later)
    aware = Prompt.of_sample(TOKENIZER, known)
    if known.metadata["turn"] == 0:
      question = later.question
      assert known.question == ""
    assert known.context == later.context + question
    if history == "own" and known.metadata["turn"] > 0:
      assert aware.question == plain.question
    else:
      assert aware.prefilled == plain.prefilled
    assert known.answers == later.answers


def test_keys_are_of_the_words_that_are_given():
  words = KeyWords(("ad hoc", "teeny-tiny"), ("zeppelin", "x-ray"))
  part = Part("needle", 640)
  asked = needle.Grid([640], DEPTHS, 8, 0, count)
  found = needle.needle_samples(asked, words)[part]
  pairs = {f"{first}-{second}" for first in words[0] for second in words[1]}
  assert {key for s in found for key in s.metadata["keys"]} == pairs
  for sample in found:
    (key,) = sample.metadata["keys"]
    assert f"for {key} is: {sample.answers[0]}." in sample.context
  (turns,) = generator.samples(
    [640], 4, 1, 0, TOKENIZER, "shared", words=words
  ).values()
  assert {key for s in turns for key in s.metadata["keys"]} == pairs


def test_equal_seeds_give_equal_conversations():
  assert talks("shared", seed=5) == drawn_talks("shared", seed=5)
  for part, drawn in talks("shared", seed=5).items():
    assert drawn != talks("shared", seed=6)[part]
