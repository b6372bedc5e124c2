"""Answers from every candidate's cache, after one prefill per batch."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.cache.cache import join_key
from kvjax.errors import InputError
from kvjax.experiments import prefilling
from kvjax.experiments.candidates import Candidate
from kvjax.experiments.metrics import passkey
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer
from kvjax.placement import HOST
from kvjax.prompts import bucket

Protocol = Literal["query-agnostic", "query-aware", "first-query-aware"]
QUERY_AGNOSTIC: Protocol = "query-agnostic"
QUERY_AWARE: Protocol = "query-aware"
# Of a conversation, whose context ends with the first question.
FIRST_QUERY_AWARE: Protocol = "first-query-aware"

# Widths are multiples of this, so that other seeds find the same shapes.
_WIDTH = 32


@dataclasses.dataclass(frozen=True)
class Prompt:
  """Token ids of a prompt, whose two parts are encoded apart.

  Attributes:
    context: what is prefilled and compressed.
    question: what follows: question, end of turn, start of the answer.
    max_new_tokens: most tokens of the answer.
    stays: see `Sample`.
    key_token: first token of the right answer, where a metric looks for it.
  """

  context: list[int]
  question: list[int]
  max_new_tokens: int
  stays: bool = False
  key_token: int | None = None

  @classmethod
  def of(
    cls,
    tokenizer: Tokenizer,
    context: str,
    question: str,
    prefix: str,
    max_new_tokens: int,
    chat: bool = True,
    key: str | None = None,
  ) -> "Prompt":
    """Encodes the texts, by default in the model's own chat form."""
    before, after = (
      tokenizer.split_chat(context) if chat else (tokenizer.bos + context, "")
    )
    asked = question + after + prefix
    return cls(
      tokenizer.encode(before),
      tokenizer.encode(asked),
      max_new_tokens,
      key_token=None
      if key is None
      else passkey.first_key_token(tokenizer, asked, key),
    )

  @classmethod
  def of_sample(cls, tokenizer: Tokenizer, sample: Sample) -> "Prompt":
    """The prompt of a task's sample."""
    prompt = cls.of(
      tokenizer,
      sample.context,
      sample.question,
      sample.answer_prefix,
      sample.max_new_tokens,
      sample.chat,
      sample.answers[0] if sample.metric == "passkey" else None,
    )
    return dataclasses.replace(prompt, stays=sample.stays)

  @property
  def prefilled(self) -> list[int]:
    """Context and question, where they are prefilled together."""
    return self.context + self.question

  @property
  def total(self) -> int:
    """Tokens of prompt and longest answer."""
    return len(self.context) + len(self.question) + self.max_new_tokens


# The prompts of one context, whose questions are asked one after another.
Prompted = Sequence[Prompt]


class Shape(NamedTuple):
  """What batches are padded to, so that they compile once.

  Attributes:
    rows: prompts of a batch.
    context: tokens that are prefilled.
    question: tokens that are fed afterwards; 0 where the question is prefilled
      too, before anything is evicted or indexed.
  """

  rows: int
  context: int
  question: int

  @classmethod
  def of(
    cls,
    prompts: Sequence[Prompt],
    rows: int,
    protocol: Protocol = QUERY_AGNOSTIC,
  ) -> "Shape":
    """The least shape that holds all prompts."""
    if protocol == QUERY_AWARE:
      both = max(len(prompt.prefilled) for prompt in prompts)
      return cls(rows, _round_up(both), 0)
    contexts = max(len(prompt.context) for prompt in prompts)
    questions = max(len(prompt.question) for prompt in prompts)
    return cls(rows, _round_up(contexts), _round_up(questions))


class _Held(NamedTuple):
  """What a cache holds of each row.

  Attributes:
    seen: tokens that the row has had.
    kept: those held, mean over layers and KV heads.
    read: those that the next token attends to, likewise.
  """

  seen: Int[np.ndarray, " R"]
  kept: Float[np.ndarray, " R"]
  read: Float[np.ndarray, " R"]

  @classmethod
  def of(cls, cache: kvjax.Cache) -> "_Held":
    seen, kept, read = jax.device_get(
      (cache.next_positions, cache.lengths, cache.num_attended)
    )
    kept, read = (
      np.mean(valid, axis=(0, 2), dtype=np.float64) for valid in (kept, read)
    )
    return cls(seen, kept, read)


class Reply(NamedTuple):
  """What a candidate's cache makes the model answer.

  Attributes:
    candidate: whose cache.
    row: number of the context in its batch.
    turn: number of the question among those of the context.
    context_tokens: tokens of what was prefilled and, where turns stay in the
      cache, of all turns so far.
    retention: share of them that the budget allows, or that its calibration
      has told.
    kept_tokens: tokens held, mean over layers and KV heads.
    read_tokens: tokens that the next token attends to, likewise.
    cache_bytes: bytes allocated for the row after the prefill.
    host_bytes: those of them that live with the host.
    tokens: ids of the answer.
    text: the answer.
  """

  candidate: Candidate
  row: int
  turn: int
  context_tokens: int
  retention: float
  kept_tokens: float
  read_tokens: float
  cache_bytes: int
  host_bytes: int
  tokens: list[int]
  text: str


@dataclasses.dataclass
class Seconds:
  """Where the time went, compilation included."""

  prefill: float = 0.0
  answer: float = 0.0


def check_room(lm: Pretrained, prompts: Sequence[Prompt]) -> None:
  """Refuses prompts that are longer than the model's context.

  Raises:
    InputError: prompt and answer together do not fit.
  """
  limit = lm.config.geometry.max_positions
  longest = max(prompts, key=lambda prompt: prompt.total)
  if longest.total > limit:
    raise InputError(
      f"Context ({len(longest.context)} tokens), question "
      f"({len(longest.question)}) and answer (up to {longest.max_new_tokens}) "
      f"come to {longest.total} tokens; the context of this model is {limit}."
    )


def replies(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  contexts: Sequence[Prompted],
  shape: Shape,
  seconds: Seconds,
) -> Iterator[list[Reply]]:
  """Prefills a batch once and answers from each candidate's cache.

  Caches of equal sizes are asked as one batch. A candidate that works in blocks
  has a prefill, and one that evicts while decoding a batch, of its own. Each
  question sees the cache that its context has left, or, where turns stay in it,
  the one that the turn before has left.

  Args:
    lm: the model.
    candidates: methods and budgets.
    contexts: at most `shape.rows`, each with its prompts, all of which have the
      same `max_new_tokens`. Where questions are prefilled too, a context has
      one.
    shape: see `Shape`.
    seconds: the time taken is added to it.

  Yields:
    The replies to one question per context of each such batch, when they are
    there.
  """
  rows = [*contexts, *[contexts[-1]] * (shape.rows - len(contexts))]
  began = time.monotonic()
  texts = [
    prompts[0].context if shape.question else prompts[0].prefilled
    for prompts in rows
  ]
  prefilled = prefilling.prefilled(
    lm,
    [candidate.plan for candidate in candidates],
    kvjax.Prompts.of(texts, shape.context),
  )
  caches = [one.cache for one in prefilled]
  jax.block_until_ready(prefilled)
  seconds.prefill += time.monotonic() - began

  turns = max(len(prompts) for prompts in contexts)
  stay = contexts[0][0].stays
  for group in groups(caches):
    cache = kvjax.stack([caches[i] for i in group])
    logits = jnp.concatenate([prefilled[i].logits for i in group])
    places = range(0, len(logits), shape.rows)
    valid = _Held.of(cache)
    if stay:
      cache = _with_room(cache, rows[0], shape)
    for turn in range(turns):
      began = time.monotonic()
      asked = [prompts[min(turn, len(prompts) - 1)] for prompts in rows]
      if stay:
        answers, cache = _turn(lm, cache, asked, shape)
        valid = _Held.of(cache)
      else:
        answers = _answers(lm, cache, logits, asked, shape)
      seconds.answer += time.monotonic() - began
      yield [
        Reply(
          candidates[index],
          row,
          turn,
          seen := int(valid.seen[place + row]),
          candidates[index].retention(seen)
          if (told := prefilled[index].retentions) is None
          else float(told[row]),
          float(valid.kept[place + row]),
          float(valid.read[place + row]),
          caches[index].nbytes // shape.rows,
          caches[index].nbytes_by_memory[HOST] // shape.rows,
          ids := answers[place + row],
          lm.text.decode(ids),
        )
        for place, index in zip(places, group, strict=True)
        for row, prompts in enumerate(contexts)
        if turn < len(prompts)
      ]


def _answers(
  lm: Pretrained,
  cache: kvjax.Cache,
  logits: Float[Array, "B V"],
  asked: Sequence[Prompt],
  shape: Shape,
) -> list[list[int]]:
  """The answers of a cache whose rows are those of `asked` again and again."""
  decoding = kvjax.Decoding(asked[0].max_new_tokens, lm.text.eos_ids)
  prompts = _questions(cache, asked, shape) if shape.question else logits
  return kvjax.generate(lm.model, lm.params, cache, prompts, decoding).rows()


def _turn(
  lm: Pretrained, cache: kvjax.Cache, asked: Sequence[Prompt], shape: Shape
) -> tuple[list[list[int]], kvjax.Cache]:
  """As `_answers`, and the cache with the turn; the one given is consumed."""
  decoding = kvjax.Decoding(asked[0].max_new_tokens, lm.text.eos_ids)
  questions = _questions(cache, asked, shape)
  turn = kvjax.generate(
    lm.model, lm.params, cache, questions, decoding, keep=True
  )
  assert turn.cache is not None
  return turn.rows(), turn.cache


def _questions(
  cache: kvjax.Cache, asked: Sequence[Prompt], shape: Shape
) -> kvjax.Prompts:
  """One for each row of the cache."""
  one = kvjax.Prompts.of([p.question for p in asked], shape.question)
  return one.repeat(cache.next_positions.shape[0] // len(asked))


def _with_room(
  cache: kvjax.Cache, turns: Prompted, shape: Shape
) -> kvjax.Cache:
  """A copy of the cache with room for turns that stay in it."""
  most = shape.question + turns[0].max_new_tokens
  every = len(turns) * most
  cache = kvjax.reserve(cache, every)
  plan = cache.plan
  if plan is None:
    return cache
  # What may be kept grows with what has been said.
  padded = bucket(shape.context + every)
  lasting = plan.spread.capacity_between(plan.fixed_budget, padded)
  return cache.grow([lasting + most] * len(cache.stacks))


def groups(caches: Sequence[kvjax.Cache]) -> list[list[int]]:
  """Numbers of the caches that can be asked together (`kvjax.stack`)."""
  found: dict[Any, list[int]] = {}
  for index, cache in enumerate(caches):
    found.setdefault(join_key(cache), []).append(index)
  return list(found.values())


def _round_up(length: int) -> int:
  return -(-length // _WIDTH) * _WIDTH
