"""Answers from every candidate's cache, after one prefill per batch."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

import kvjax
from experiments.candidates import Candidate
from experiments.tasks.sample import Sample
from kvjax.errors import InputError
from models.pretrained import Pretrained
from models.tokenizer import Tokenizer

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
  ) -> "Prompt":
    """Puts the texts into the model's own chat form and encodes them."""
    before, after = tokenizer.split_chat(context)
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
    )

  @property
  def total(self) -> int:
    """Tokens of prompt and longest answer."""
    return len(self.context) + len(self.question) + self.max_new_tokens


class Shape(NamedTuple):
  """What all batches of a run are padded to, so that they compile once."""

  rows: int
  context: int
  question: int

  @classmethod
  def of(cls, prompts: Sequence[Prompt], rows: int) -> "Shape":
    """The least shape that holds all prompts."""
    contexts = max(len(prompt.context) for prompt in prompts)
    questions = max(len(prompt.question) for prompt in prompts)
    return cls(rows, _round_up(contexts), _round_up(questions))


class Reply(NamedTuple):
  """What a candidate's cache makes the model answer.

  Attributes:
    candidate: whose cache.
    row: number of the prompt in its batch.
    retention: share of the context that the budget allows.
    kept_tokens: tokens held, mean over layers and KV heads.
    cache_bytes: bytes allocated for the row.
    text: the answer.
  """

  candidate: Candidate
  row: int
  retention: float
  kept_tokens: float
  cache_bytes: int
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
  prompts: Sequence[Prompt],
  shape: Shape,
  seconds: Seconds,
) -> Iterator[list[Reply]]:
  """Prefills a batch once and answers from each candidate's cache.

  Caches of about equal capacities are asked as one batch. A candidate that
  works in blocks has a prefill, and one that evicts while decoding a batch, of
  its own.

  Args:
    lm: the model.
    candidates: methods and budgets.
    prompts: at most `shape.rows`, all with the same `max_new_tokens`.
    shape: see `Shape`.
    seconds: the time taken is added to it.

  Yields:
    The replies of each such batch, when they are there.
  """
  rows = [*prompts, *[prompts[-1]] * (shape.rows - len(prompts))]
  began = time.monotonic()
  contexts = kvjax.Prompts.of([p.context for p in rows], shape.context)
  caches = _caches(lm, [candidate.plan for candidate in candidates], contexts)
  kept = jax.device_get([cache.lengths for cache in caches])
  jax.block_until_ready(caches)
  seconds.prefill += time.monotonic() - began

  questions = kvjax.Prompts.of([p.question for p in rows], shape.question)
  decoding = kvjax.Decoding(prompts[0].max_new_tokens, lm.tokenizer.eos_ids)
  for capacity, group in _groups(candidates, caches):
    began = time.monotonic()
    answers = kvjax.answer(
      lm.model,
      lm.params,
      kvjax.concatenate(
        [caches[i].grown([capacity] * len(caches[i].layers)) for i in group]
      ),
      kvjax.Prompts(
        np.tile(questions.tokens, (len(group), 1)),
        np.tile(questions.lengths, len(group)),
      ),
      decoding,
    ).rows()
    seconds.answer += time.monotonic() - began
    found = []
    for place, index in enumerate(group):
      start = place * shape.rows
      mine = answers[start : start + len(prompts)]
      each = caches[index].nbytes // shape.rows
      found += _replies(lm, candidates[index], kept[index], each, prompts, mine)
    yield found


def _replies(
  lm: Pretrained,
  candidate: Candidate,
  lengths: Int[np.ndarray, "L B K"],
  each: int,
  prompts: Sequence[Prompt],
  answers: Sequence[list[int]],
) -> list[Reply]:
  kept = np.mean(lengths, axis=(0, 2), dtype=np.float64)
  return [
    Reply(
      candidate,
      row,
      candidate.retention(len(prompts[row].context)),
      float(kept[row]),
      each,
      lm.tokenizer.decode(ids),
    )
    for row, ids in enumerate(answers)
  ]


def _caches(
  lm: Pretrained, plans: Sequence[kvjax.Plan], contexts: kvjax.Prompts
) -> list[kvjax.Cache]:
  """One cache per plan; plans for whole prompts share a forward pass."""
  model, params = lm.model, lm.params
  shared = [plan for plan in plans if plan.schedule.block is None]
  swept = iter(
    kvjax.sweep(model, params, contexts, shared)[0] if shared else ()
  )
  return [
    next(swept)
    if plan.schedule.block is None
    else kvjax.prefill(model, params, contexts, plan)[0]
    for plan in plans
  ]


def _groups(
  candidates: Sequence[Candidate], caches: Sequence[kvjax.Cache]
) -> list[tuple[int, list[int]]]:
  """Caches that are asked together, with the capacity that holds them all.

  Layers of unequal capacities go to the next group that has room for the
  largest, which saves them a compilation of their own. Caches whose heads keep
  different numbers join nobody.
  """
  sizes = [{layer.capacity for layer in cache.layers} for cache in caches]
  common = {max(size) for size in sizes if len(size) == 1}
  groups: dict[int, list[int]] = {}
  alone = []
  for index, (candidate, size) in enumerate(
    zip(candidates, sizes, strict=True)
  ):
    plan = candidate.plan
    if plan.schedule.every is not None or plan.method.packed:
      alone.append((max(size), [index]))
      continue
    fitting = [capacity for capacity in common if capacity >= max(size)]
    capacity = min(fitting, default=max(size))
    groups.setdefault(capacity, []).append(index)
  return [*groups.items(), *alone]


def _round_up(length: int) -> int:
  return -(-length // _WIDTH) * _WIDTH
