"""Conversations about one context, a needle per turn.

CTkvr and ShadowKV report such conversations without code; needle count, wording
and history are this project's. With `shared`, every question sees only the
compressed context, as in kvpress. With `conversation`, the earlier questions
and their references precede it, as in SCBench's multi-turn mode, so all methods
get the same prompts. With `own`, the cache continues from turn to turn with the
model's own answers; a plan that evicts while decoding compresses it again in
every turn.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from kvjax.experiments.run.results import Part
from kvjax.experiments.tasks import niah, prose
from kvjax.experiments.tasks.sample import OnDraw, Sample, ignore
from kvjax.experiments.tasks.words import BUILT_IN, KeyWords
from kvjax.models.tokenizer import Tokenizer

History = Literal["shared", "conversation", "own"]
HISTORIES: tuple[History, ...] = get_args(History)

# Tokens of an answer, which is a number of seven digits.
_ANSWER = 16


def samples(
  lengths: Sequence[int],
  turns: int,
  conversations: int,
  seed: int,
  tokenizer: Tokenizer,
  history: History,
  on_draw: OnDraw = ignore,
  *,
  first_known: bool = False,
  essay: prose.Essay = "heldout",
  words: KeyWords = BUILT_IN,
) -> dict[Part, list[Sample]]:
  """Draws conversations of several turns for each length.

  Args:
    lengths: maximum tokens of the context with all questions and answers.
    turns: questions per context, each about another needle.
    conversations: conversations per length.
    seed: seed of all samples.
    tokenizer: the model's tokenizer, which also separates turns.
    history: what a question sees of earlier turns.
    on_draw: called for every conversation.
    first_known: whether the first question is part of the context and known
      before compression; not for `shared`.
    essay: the prose around the needles.
    words: the words of their keys.

  Returns:
    For each length, the turns of all conversations in order.

  Raises:
    InputError: a length is too short.
  """
  task = niah.NeedleTask(
    "niah_multiturn",
    "essay",
    key_count=turns,
    max_new_tokens=_ANSWER,
    words=words,
  )

  def draw(length: int, number: int) -> tuple[Sample, ...]:
    rng = random.Random(f"{seed} {task.name} {turns} {number}")
    drawn = niah.conversation(task, rng, length, tokenizer.count, essay=essay)
    on_draw(task.name, 1)
    if first_known:
      drawn = _with_first_question(drawn)
    return tuple(_WITH_HISTORY[history](drawn, tokenizer))

  return {
    Part(f"{task.name}_{history}", length): [
      dataclasses.replace(sample, metadata=dict(sample.metadata, turn=turn))
      for number in range(conversations)
      for turn, sample in enumerate(draw(length, number))
    ]
    for length in lengths
  }


def _with_first_question(turns: Sequence[Sample]) -> tuple[Sample, ...]:
  """Moves the question of the first turn to the end of the context."""
  first, *rest = turns
  known = first.with_question_in_context()
  return (
    known,
    *(dataclasses.replace(sample, context=known.context) for sample in rest),
  )


def _with_references(
  turns: Sequence[Sample], tokenizer: Tokenizer
) -> Iterator[Sample]:
  _, suffix = tokenizer.split_chat("")
  history_text = ""
  for sample in turns:
    question = history_text + sample.question
    yield dataclasses.replace(sample, question=question)
    answer = f"{sample.answer_prefix} {sample.answers[0]}"
    history_text = question + suffix + answer + tokenizer.between_turns()


def continued(
  turns: Sequence[Sample], tokenizer: Tokenizer
) -> Iterator[Sample]:
  """Yields turns that stay in the cache, each after the end of an answer."""
  between = ""
  for sample in turns:
    yield dataclasses.replace(
      sample, question=between + sample.question, stays=True
    )
    between = tokenizer.between_turns()


_WITH_HISTORY: Mapping[
  History, Callable[[Sequence[Sample], Tokenizer], Iterable[Sample]]
] = {
  "shared": lambda turns, tokenizer: turns,
  "conversation": _with_references,
  "own": continued,
}
