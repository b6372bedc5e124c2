"""Conversations about one context, a needle per turn.

CTkvr and ShadowKV report such conversations without their code; needle count,
wording and history are this project's. In `shared` every question sees the
cache as the context has left it, as in kvpress; in `conversation` the earlier
questions stand before it with their references, as in SCBench's multi-turn
mode, so that all methods are asked the same. In `own` the cache is carried on
from turn to turn with what the model itself has answered; a plan that evicts
while decoding compresses it again in every turn.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from kvjax.experiments.results import Part
from kvjax.experiments.tasks import needles
from kvjax.experiments.tasks.sample import OnDraw, Sample, ignore
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
) -> dict[Part, list[Sample]]:
  """So many conversations of so many turns for each length.

  Args:
    lengths: bounds on the tokens of the context, all questions and answers.
    turns: questions per context, each about a needle of its own.
    conversations: per length.
    seed: of all samples.
    tokenizer: of the model, for tokens and for what stands between turns.
    history: what a question sees of the turns before it.
    on_draw: told of every conversation.
    first_known: whether the first question is part of the context, and so
      known when that is compressed; not for `shared`.

  Returns:
    Under each length the turns of the first conversation, then those of the
    next, and so on.

  Raises:
    InputError: a length is too short.
  """
  task = needles.NeedleTask(
    "niah_multiturn", "essay", key_count=turns, max_new_tokens=_ANSWER
  )

  def draw(length: int, number: int) -> tuple[Sample, ...]:
    rng = random.Random(f"{seed} {task.name} {turns} {number}")
    found = needles.conversation(task, rng, length, tokenizer.count)
    on_draw(task.name, 1)
    if first_known:
      found = _with_first_question(found)
    return tuple(_WITH_HISTORY[history](found, tokenizer))

  return {
    Part(f"{task.name}_{history}", length): [
      dataclasses.replace(sample, metadata=dict(sample.metadata, turn=turn))
      for number in range(conversations)
      for turn, sample in enumerate(draw(length, number))
    ]
    for length in lengths
  }


def _with_first_question(turns: Sequence[Sample]) -> tuple[Sample, ...]:
  """The same turns, whose context ends with the question of the first."""
  first, *others = turns
  context = first.context + first.question
  return (
    dataclasses.replace(first, context=context, question=""),
    *(dataclasses.replace(sample, context=context) for sample in others),
  )


def _alone(turns: Sequence[Sample], tokenizer: Tokenizer) -> Iterator[Sample]:
  del tokenizer
  yield from turns


def _with_references(
  turns: Sequence[Sample], tokenizer: Tokenizer
) -> Iterator[Sample]:
  _, suffix = tokenizer.split_chat("")
  before = ""
  for sample in turns:
    question = before + sample.question
    yield dataclasses.replace(sample, question=question)
    said = f"{sample.answer_prefix} {sample.answers[0]}"
    before = question + suffix + said + tokenizer.between_turns()


def _carried_on(
  turns: Sequence[Sample], tokenizer: Tokenizer
) -> Iterator[Sample]:
  between = ""
  for sample in turns:
    yield dataclasses.replace(
      sample, question=between + sample.question, stays=True
    )
    between = tokenizer.between_turns()


_WITH_HISTORY: Mapping[
  History, Callable[[Sequence[Sample], Tokenizer], Iterator[Sample]]
] = {
  "shared": _alone,
  "conversation": _with_references,
  "own": _carried_on,
}
