"""Generates answers from every candidate's cache, one prefill per batch."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array, Float, Int

import kvjax
from kvjax import hosts
from kvjax.experiments.run import prefilling
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.measured import Measured
from kvjax.experiments.run.prompting import Prompt, Prompted, Shape
from kvjax.experiments.run.token_counts import TokenCounts
from kvjax.models.pretrained import Pretrained
from kvjax.placement import HOST
from kvjax.prompts import bucket
from kvjax.struct import tree_bytes


@dataclasses.dataclass(frozen=True)
class Reply(Measured):
  """An answer generated from a candidate's cache.

  Attributes:
    candidate: the candidate.
    row: number of the context in its batch.
    turn: number of the question in its context.
    tokens: ids of the answer.
    text: the answer.
  """

  candidate: Candidate
  row: int
  turn: int
  tokens: list[int]
  text: str


@dataclasses.dataclass
class Seconds:
  """Time spent per phase, compilation included."""

  prefill: float = 0.0
  answer: float = 0.0


def replies(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  contexts: Sequence[Prompted],
  shape: Shape,
  seconds: Seconds,
) -> Iterator[list[Reply]]:
  """Prefills a batch once and generates answers from each candidate's cache.

  Caches of one kind decode as one batch, unless the smaller ones would need
  more bytes of empty slots than the weights have. A candidate that prefills in
  blocks has its own prefill; one that evicts while decoding has its own batch.
  Each question sees the compressed context or, if turns stay in the cache, the
  cache after the previous turn.

  Args:
    lm: the model.
    candidates: methods and budgets.
    contexts: at most `shape.rows` contexts with their prompts, all with the
      same `max_new_tokens` and sampling, and with turns that all stay in the
      cache or do not. If questions are prefilled, each context has one.
    shape: see `Shape`.
    seconds: the elapsed time is added to it.

  Yields:
    The replies of a batch to one question per context.
  """
  rows = [*contexts, *[contexts[-1]] * (shape.rows - len(contexts))]
  began = time.monotonic()
  prefilled = _prefill(lm, candidates, rows, shape)
  elapsed = time.monotonic() - began
  seconds.prefill += elapsed
  logging.info(
    "Prefilled %d contexts of up to %d tokens for %d caches in %.1f s",
    *(len(contexts), shape.context, len(prefilled), elapsed),
  )
  turns = max(len(prompts) for prompts in contexts)
  stays = contexts[0][0].stays
  for group in _groups(lm, [one.cache for one in prefilled.values()], stays):
    # Each cache is freed when it has been joined.
    parts = [prefilled.pop(index) for index in group]
    joined = _Joined.of(lm, parts, rows, shape)
    del parts
    if stays:
      joined.cache = _with_capacity(joined.cache, rows[0], shape)
    for turn in range(turns):
      began = time.monotonic()
      answers = joined.answer(
        lm, [prompts[min(turn, len(prompts) - 1)] for prompts in rows], shape
      )
      elapsed = time.monotonic() - began
      seconds.answer += elapsed
      logging.info("Answered from %d caches in %.1f s", len(group), elapsed)
      yield [
        joined.reply(lm, candidates[index], place, row, turn, answers)
        for place, index in enumerate(group)
        for row, prompts in enumerate(contexts)
        if turn < len(prompts)
      ]
    # Before the next group is joined.
    del joined


def _prefill(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  rows: Sequence[Prompted],
  shape: Shape,
) -> dict[int, prefilling.Prefilled]:
  """Prefills the contexts for every candidate, and waits until it is done."""
  plans = [candidate.plan for candidate in candidates]
  prompts = shape.batch([prompts[0] for prompts in rows])
  prefilled = dict(enumerate(prefilling.prefill_all(lm, plans, prompts)))
  jax.block_until_ready(prefilled)
  return prefilled


class _OwnCache(NamedTuple):
  """What is reported of a candidate's cache before it is joined with others.

  Attributes:
    nbytes: bytes allocated after the prefill.
    host_nbytes: the part of these in host memory.
    decoding_nbytes: bytes allocated while answers are decoded from it alone.
    retentions: retention of each row, if a calibration chose it.
  """

  nbytes: int
  host_nbytes: int
  decoding_nbytes: int
  retentions: Float[np.ndarray, " B"] | None

  @classmethod
  def of(
    cls,
    lm: Pretrained,
    prefilled: prefilling.Prefilled,
    prompt: Prompt,
    shape: Shape,
  ) -> "_OwnCache":
    cache = prefilled.cache
    return cls(
      cache.nbytes,
      cache.nbytes_by_memory[HOST],
      kvjax.decoding_nbytes(
        lm.model, cache, shape.question, _decoding(lm, [prompt])
      ),
      prefilled.retentions,
    )


@dataclasses.dataclass
class _Joined:
  """Caches of several candidates that decode as one batch.

  Attributes:
    cache: the caches, with the rows of one candidate after those of another.
    logits: logits after the context.
    tokens: tokens of each row that were processed so far.
    counts: tokens of each row that are left.
    own: what is reported of each candidate's own cache.
    rows: rows of a candidate.
    stays: whether turns stay in the cache.
  """

  cache: kvjax.Cache
  logits: Float[Array, "B V"]
  tokens: Int[np.ndarray, " R"]
  counts: TokenCounts
  own: list[_OwnCache]
  rows: int
  stays: bool

  @classmethod
  def of(
    cls,
    lm: Pretrained,
    parts: Sequence[prefilling.Prefilled],
    contexts: Sequence[Prompted],
    shape: Shape,
  ) -> "_Joined":
    """Joins caches.

    Args:
      lm: the model.
      parts: the caches.
      contexts: the rows of each cache, whose prompts all have equal options.
      shape: see `Shape`.
    """
    prompt = contexts[0][0]
    lengths = [len(shape.prefilled(prompts[0])) for prompts in contexts]
    tokens = np.tile(np.array(lengths, np.int32), len(parts))
    own = [_OwnCache.of(lm, part, prompt, shape) for part in parts]
    cache = kvjax.stack([part.cache for part in parts])
    logits = jnp.concatenate([part.logits for part in parts])
    counts = TokenCounts.of(cache)
    return cls(cache, logits, tokens, counts, own, shape.rows, prompt.stays)

  def answer(
    self, lm: Pretrained, prompts: Sequence[Prompt], shape: Shape
  ) -> list[list[int]]:
    """Answers a question of each context; keeps the turn if turns stay."""
    copies = len(self.own)
    seeds = np.array([prompt.seed for prompt in prompts], np.int32)
    after: kvjax.Prompts | Float[Array, "B V"] = self.logits
    if shape.question:
      asked = [prompt.question for prompt in prompts]
      after = kvjax.Prompts.of(asked, shape.question).repeat(copies)
    # Renumbered tokens count from what was kept: only the difference is tokens.
    start = hosts.read(self.cache.next_positions) if self.stays else 0
    turn = kvjax.generate(
      lm.model,
      lm.params,
      self.cache,  # donated, if the turn is kept
      after,
      _decoding(lm, prompts),
      keep=self.stays,
      seeds=np.tile(seeds, copies),
    )
    if self.stays:
      assert turn.cache is not None
      self.cache, self.counts = turn.cache, TokenCounts.of(turn.cache)
      self.tokens = self.tokens + hosts.read(self.cache.next_positions) - start
    return turn.rows()

  def reply(
    self,
    lm: Pretrained,
    candidate: Candidate,
    place: int,
    row: int,
    turn: int,
    answers: Sequence[list[int]],
  ) -> Reply:
    """Reports the answer of a candidate to the question of a row.

    Args:
      lm: the model.
      candidate: the candidate.
      place: its place among those that are joined.
      row: number of the context.
      turn: number of the question.
      answers: what `answer` returned.
    """
    own, counts = self.own[place], self.counts
    at = place * self.rows + row
    tokens = int(self.tokens[at])
    if isinstance(candidate.plan.budget, kvjax.Threshold):
      retention = float(counts.evictable[at] / tokens)
    elif own.retentions is None:
      retention = candidate.retention(tokens)
    else:
      retention = float(own.retentions[row])
    decoding_nbytes = own.decoding_nbytes
    if self.stays:
      decoding_nbytes = self.cache.nbytes // len(self.own)
    of_global = counts.kept_globally
    return Reply(
      candidate,
      row,
      turn,
      answers[at],
      lm.text.decode(answers[at]),
      context_tokens=tokens,
      retention=retention,
      kept_tokens=float(counts.kept[at]),
      read_tokens=float(counts.read[at]),
      cache_bytes=own.nbytes // self.rows,
      host_bytes=own.host_nbytes // self.rows,
      global_tokens=None if of_global is None else float(of_global[at]),
      answer_tokens=len(answers[at]),
      decoding_bytes=decoding_nbytes // self.rows,
    )


def _groups(
  lm: Pretrained, caches: Sequence[kvjax.Cache], stays: bool
) -> list[list[int]]:
  """Groups caches that decode together, those that take least memory first.

  The copies of the large ones are made when the others are gone.
  """
  # A conversation's cache has its own size, which is reported.
  padding = 0 if stays else tree_bytes(lm.params)
  return sorted(
    kvjax.group_caches(caches, padding),
    key=lambda group: sum(caches[index].nbytes for index in group),
  )


def _decoding(lm: Pretrained, prompts: Sequence[Prompt]) -> kvjax.Decoding:
  first = prompts[0]
  return lm.decoding(first.max_new_tokens, first.sampling)


def _with_capacity(
  cache: kvjax.Cache, turns: Prompted, shape: Shape
) -> kvjax.Cache:
  """Copies the cache with capacity for the turns that stay in it."""
  per_turn = shape.question + turns[0].max_new_tokens
  all_turns = len(turns) * per_turn
  cache = kvjax.reserve(cache, all_turns)
  plan = cache.plan
  if plan is None:
    return cache
  # A retention budget grows with the conversation.
  padded = bucket(shape.context + all_turns)
  kept = plan.spread.capacity_between(plan.fixed_budget, padded)
  return cache.grow([kept + per_turn] * len(cache.stacks))
