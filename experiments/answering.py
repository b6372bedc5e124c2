"""Answers from every candidate's cache, after one prefill per batch."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from experiments.candidates import Candidate
from experiments.tasks.sample import Sample
from kvjax.errors import InputError
from kvjax.placement import HOST
from models.pretrained import Pretrained
from models.tokenizer import Tokenizer

Protocol = Literal["query-agnostic", "query-aware"]
QUERY_AGNOSTIC: Protocol = "query-agnostic"
QUERY_AWARE: Protocol = "query-aware"

# Widths are multiples of this, so that other seeds find the same shapes.
_WIDTH = 32


@dataclasses.dataclass(frozen=True)
class Prompt:
  """Token ids of a prompt, whose two parts are encoded apart.

  Attributes:
    context: what is prefilled and compressed.
    question: what follows: question, end of turn, start of the answer.
    max_new_tokens: most tokens of the answer.
  """

  context: list[int]
  question: list[int]
  max_new_tokens: int

  @classmethod
  def of(
    cls,
    tokenizer: Tokenizer,
    context: str,
    question: str,
    prefix: str,
    max_new_tokens: int,
    chat: bool = True,
  ) -> "Prompt":
    """Encodes the texts, by default in the model's own chat form."""
    before, after = (
      tokenizer.split_chat(context) if chat else (tokenizer.bos + context, "")
    )
    return cls(
      tokenizer.encode(before),
      tokenizer.encode(question + after + prefix),
      max_new_tokens,
    )

  @classmethod
  def of_sample(cls, tokenizer: Tokenizer, sample: Sample) -> "Prompt":
    """The prompt of a task's sample."""
    return cls.of(
      tokenizer,
      sample.context,
      sample.question,
      sample.answer_prefix,
      sample.max_new_tokens,
      sample.chat,
    )

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


class _Prefilled(NamedTuple):
  """What is left of a batch's prompts.

  Attributes:
    cache: of a plan.
    logits: after the prompts.
    retentions: of the rows, where a calibration has told them.
  """

  cache: kvjax.Cache
  logits: Float[Array, "B V"]
  retentions: Float[np.ndarray, " B"] | None = None


class Reply(NamedTuple):
  """What a candidate's cache makes the model answer.

  Attributes:
    candidate: whose cache.
    row: number of the context in its batch.
    turn: number of the question among those of the context.
    context_tokens: tokens of what was prefilled.
    retention: share of them that the budget allows, or that its calibration
      has told.
    kept_tokens: tokens held, mean over layers and KV heads.
    read_tokens: tokens that the next token attends to, likewise.
    cache_bytes: bytes allocated for the row.
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

  Caches of about equal capacities are asked as one batch. A candidate that
  works in blocks has a prefill, and one that evicts while decoding a batch, of
  its own. Each question sees the cache that its context has left.

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
  prefilled = _prefilled(
    lm,
    [candidate.plan for candidate in candidates],
    kvjax.Prompts.of(texts, shape.context),
  )
  caches = [one.cache for one in prefilled]
  kept, read = jax.device_get(
    ([cache.lengths for cache in caches], [cache.reads for cache in caches])
  )
  jax.block_until_ready(prefilled)
  seconds.prefill += time.monotonic() - began

  turns = max(len(prompts) for prompts in contexts)
  for capacity, group in groups(candidates, caches):
    cache = joined([caches[i] for i in group], capacity)
    logits = jnp.concatenate([prefilled[i].logits for i in group])
    for turn in range(turns):
      began = time.monotonic()
      asked = [prompts[min(turn, len(prompts) - 1)] for prompts in rows]
      answers = _answers(lm, cache, logits, asked, shape)
      seconds.answer += time.monotonic() - began
      yield [
        Reply(
          candidates[index],
          row,
          turn,
          len(texts[row]),
          candidates[index].retention(len(texts[row]))
          if (told := prefilled[index].retentions) is None
          else float(told[row]),
          float(np.mean(kept[index][:, row], dtype=np.float64)),
          float(np.mean(read[index][:, row], dtype=np.float64)),
          caches[index].nbytes // shape.rows,
          caches[index].nbytes_by_memory[HOST] // shape.rows,
          ids := answers[place * shape.rows + row],
          lm.tokenizer.decode(ids),
        )
        for place, index in enumerate(group)
        for row, prompts in enumerate(contexts)
        if turn < len(prompts)
      ]


def joined(caches: Sequence[kvjax.Cache], capacity: int) -> kvjax.Cache:
  """Caches as one whose rows are theirs, of as many slots in every layer."""
  if len(caches) > 1:
    caches = [cache.grown([capacity] * len(cache.layers)) for cache in caches]
  return kvjax.concatenate(caches)


def _answers(
  lm: Pretrained,
  cache: kvjax.Cache,
  logits: Float[Array, "B V"],
  asked: Sequence[Prompt],
  shape: Shape,
) -> list[list[int]]:
  """The answers of a cache whose rows are those of `asked` again and again."""
  decoding = kvjax.Decoding(asked[0].max_new_tokens, lm.tokenizer.eos_ids)
  if not shape.question:
    return kvjax.complete(lm.model, lm.params, cache, logits, decoding).rows()
  one = kvjax.Prompts.of([p.question for p in asked], shape.question)
  times = logits.shape[0] // len(asked)
  questions = kvjax.Prompts(
    np.tile(one.tokens, (times, 1)), np.tile(one.lengths, times)
  )
  return kvjax.answer(lm.model, lm.params, cache, questions, decoding).rows()


def _prefilled(
  lm: Pretrained, plans: Sequence[kvjax.Plan], contexts: kvjax.Prompts
) -> list[_Prefilled]:
  """A cache and logits per plan; plans for whole prompts share a pass."""
  model, params = lm.model, lm.params
  shared = [plan for plan in plans if plan.schedule.block is None]
  swept = iter(_swept(lm, shared, contexts) if shared else ())
  return [
    next(swept)
    if plan.schedule.block is None
    else _Prefilled(*kvjax.prefill(model, params, contexts, plan))
    for plan in plans
  ]


def _swept(
  lm: Pretrained, plans: Sequence[kvjax.Plan], contexts: kvjax.Prompts
) -> list[_Prefilled]:
  """From one pass, which tells likelihoods only if a plan asks for them."""
  model, params = lm.model, lm.params
  if any(isinstance(plan.budget, kvjax.Calibrated) for plan in plans):
    found = kvjax.measured_sweep(model, params, contexts, plans)
    pairs = zip(found.caches, found.retentions, strict=True)
    return [_Prefilled(cache, found.logits, told) for cache, told in pairs]
  caches, logits = kvjax.sweep(model, params, contexts, plans)
  return [_Prefilled(cache, logits) for cache in caches]


def groups(
  candidates: Sequence[Candidate], caches: Sequence[kvjax.Cache]
) -> list[tuple[int, list[int]]]:
  """Caches that are asked together, with the capacity that holds them all.

  Layers of unequal capacities go to the next group that has room for the
  largest, which saves them a compilation of their own. Only caches that are
  stored alike are joined; those whose heads keep different numbers, and those
  that are looked up in, join nobody.
  """
  plans = [candidate.plan for candidate in candidates]
  sizes = [{layer.capacity for layer in cache.layers} for cache in caches]
  common = {
    (plan.storage, max(size))
    for plan, size in zip(plans, sizes, strict=True)
    if len(size) == 1
  }
  found: dict[tuple[str | None, int], list[int]] = {}
  alone = []
  for index, (plan, size) in enumerate(zip(plans, sizes, strict=True)):
    evicts = plan.schedule.every is not None
    if evicts or plan.method.packed or plan.lookup is not None:
      alone.append((max(size), [index]))
      continue
    fitting = [
      capacity
      for storage, capacity in common
      if storage == plan.storage and capacity >= max(size)
    ]
    capacity = min(fitting, default=max(size))
    found.setdefault((plan.storage, capacity), []).append(index)
  together = [(capacity, group) for (_, capacity), group in found.items()]
  return [*together, *alone]


def _round_up(length: int) -> int:
  return -(-length // _WIDTH) * _WIDTH
