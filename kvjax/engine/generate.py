"""Asking a cache: feed a question, then decode; all compiled."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.engine.decode import (
  Answers,
  Decoding,
  OnToken,
  Run,
  decode,
  listening,
)
from kvjax.engine.feed import evict_all, feed
from kvjax.engine.prepared import Limits, farthest, prepare_limits
from kvjax.errors import InputError
from kvjax.model import Model, check_context
from kvjax.options.budgets import Retention
from kvjax.prompts import Prompts, bucket

# One seed for each row's draws.
Seeds = Int[Array, " B"] | Int[np.ndarray, " B"]

_TOGETHER = "What the cache has seen, with question and answer,"


def reserve(cache: Cache, tokens: int) -> Cache:
  """The same cache with room for so many more tokens in every layer."""
  grown = cache.grown(_wider(cache, tokens))
  old = {id(leaf) for leaf in jax.tree.leaves(cache)}
  # A conversation may consume one cache and not the other.
  return jax.tree.map(lambda x: jnp.copy(x) if id(x) in old else x, grown)


def answer(
  model: Model,
  params: PyTree,
  cache: Cache,
  questions: Prompts,
  decoding: Decoding,
  seeds: Seeds | None = None,
  on_token: OnToken | None = None,
) -> Answers:
  """Feeds a question to each row of a cache and decodes the answers.

  The cache itself is left as it was: ask it again, and the next question sees
  the same. Where its plan evicts while decoding, it does so after the question
  and after every so many tokens; a retention is then a share of what the row
  had seen before the question.

  Args:
    model: the functions.
    params: the weights.
    cache: what is left of each row's context.
    questions: one for each row; their positions follow the uncompressed
      context.
    decoding: when and how.
    seeds: of each row's draws; zeros if not given.
    on_token: told of every token as it is made.

  Raises:
    InputError: rows and questions differ in number, or context, question and
      answer together are longer than the model's context.
  """
  seen = np.asarray(cache.next_positions)
  _check_questions(model, cache, seen, questions, decoding)
  limits = _limits(cache, seen, questions.tokens.shape[1], decoding)
  with listening(on_token) as listener:
    return _answer(
      model,
      params,
      cache,
      jnp.asarray(questions.tokens),
      jnp.asarray(questions.lengths),
      Run(_seeds(seeds, cache), listener, limits),
      decoding=decoding,
    )


def converse(
  model: Model,
  params: PyTree,
  cache: Cache,
  turns: Prompts,
  decoding: Decoding,
  seeds: Seeds | None = None,
  on_token: OnToken | None = None,
) -> tuple[Answers, Cache]:
  """As `answer`, but turn and answer stay in the cache, which is consumed.

  The cache needs room for the padded turn and the answer (`reserve`). Where it
  goes on evicting to a budget in tokens, room for the padded turn and `every`
  lasts for any number of turns. Its buffers become those of the cache that is
  returned.

  Raises:
    InputError: as `answer`, or the cache has too little room.
  """
  width = turns.tokens.shape[1]
  seen, cursors = jax.device_get(
    (cache.next_positions, [stack.next_slot for stack in cache.stacks])
  )
  _check_questions(model, cache, seen, turns, decoding)
  limits = _limits(cache, seen, width, decoding)
  used = [int(cursor.max()) for cursor in cursors]
  needed = _needed(cache, used, limits, width, decoding)
  for stack, start, most in zip(cache.stacks, used, needed, strict=True):
    if stack.capacity is not None and most > stack.capacity:
      raise InputError(
        f"Turn and answer need {most - start} free slots and the cache has "
        f"{stack.capacity - start}; give it more with kvjax.reserve."
      )
  with listening(on_token) as listener:
    return _converse(
      model,
      params,
      cache,
      jnp.asarray(turns.tokens),
      jnp.asarray(turns.lengths),
      Run(_seeds(seeds, cache), listener, limits),
      decoding=decoding,
    )


def complete(
  model: Model,
  params: PyTree,
  cache: Cache,
  logits: Float[Array, "B V"],
  decoding: Decoding,
  seeds: Seeds | None = None,
  on_token: OnToken | None = None,
) -> Answers:
  """Decodes right after a prefill, from the logits that it returned.

  Arguments and errors as for `answer`.
  """
  seen = np.asarray(cache.next_positions)
  _check_reach(model, cache, seen + decoding.max_new_tokens, 0)
  limits = _limits(cache, seen, 0, decoding)
  with listening(on_token) as listener:
    return _complete(
      model,
      params,
      cache,
      logits,
      Run(_seeds(seeds, cache), listener, limits),
      decoding=decoding,
    )


def _wider(cache: Cache, tokens: int) -> list[int | None]:
  """Capacities of the stacks with room for so many more tokens."""
  return [
    None if stack.capacity is None else stack.capacity + tokens
    for stack in cache.stacks
  ]


def _limits(
  cache: Cache, seen: Int[np.ndarray, " B"], width: int, decoding: Decoding
) -> Limits | None:
  """What the layers may hold while they are asked, if they evict then."""
  plan = cache.plan
  if plan is None or plan.budget == Retention(1.0):
    return None
  most = bucket(int(seen.max()) + width + decoding.max_new_tokens)
  return prepare_limits(plan, seen, most)


def _needed(
  cache: Cache,
  used: Sequence[int],
  limits: Limits | None,
  width: int,
  decoding: Decoding,
) -> list[int]:
  """Slots that the layers of each stack need, so many of them being used.

  Args:
    cache: whose stacks they are.
    used: per stack.
    limits: what the layers may hold after the block and every few tokens.
    width: tokens of the block that is fed first; 0 for none.
    decoding: how many tokens follow.
  """
  everything = [slots + width + decoding.max_new_tokens for slots in used]
  if limits is None:
    return everything
  plan = limits.plan
  step = min(plan.schedule.every or 1, decoding.max_new_tokens)
  first = [cache.order.index(number) for number in range(len(used))]
  return [
    # A layer that keeps everything keeps the gaps between rows as well.
    most
    if plan.method.traits.keeps_layer(layer)
    else max(slots + (width or step), limits.capacity + step)
    for layer, slots, most in zip(first, used, everything, strict=True)
  ]


def _roomy(
  cache: Cache, limits: Limits | None, width: int, decoding: Decoding
) -> Cache:
  used = [stack.capacity or 0 for stack in cache.stacks]
  return cache.grown(_needed(cache, used, limits, width, decoding))


def _seeds(seeds: Seeds | None, cache: Cache) -> Int[Array, " B"]:
  if seeds is not None:
    return jnp.asarray(seeds, jnp.int32)
  return jnp.zeros(cache.next_positions.shape, jnp.int32)


def _check_reach(
  model: Model, cache: Cache, lengths: Int[np.ndarray, " B"], width: int
) -> None:
  """Refuses rows of these lengths in the end, fed by so many at a time."""
  plan = cache.plan
  if plan is not None:
    block = max(width, plan.schedule.every or 1)
    lengths = farthest(plan, lengths, block)
  check_context(model, lengths, _TOGETHER)


def _check_questions(
  model: Model,
  cache: Cache,
  seen: Int[np.ndarray, " B"],
  questions: Prompts,
  decoding: Decoding,
) -> None:
  """Refuses questions that do not suit rows that have seen so many tokens."""
  if questions.protected is not None:
    raise InputError(
      "Tokens can be protected in what is prefilled only; give the question "
      "without a mask."
    )
  rows, asked = len(seen), questions.tokens.shape[0]
  if rows != asked:
    raise InputError(
      f"The cache has {rows} rows and {asked} questions; give one for each."
    )
  total = seen + np.asarray(questions.lengths) + decoding.max_new_tokens
  _check_reach(model, cache, total, questions.tokens.shape[1])


@functools.partial(jax.jit, static_argnames=("model", "decoding"))
def _answer(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  run: Run,
  *,
  decoding: Decoding,
) -> Answers:
  cache = _roomy(cache, run.limits, tokens.shape[1], decoding)
  logits, cache = _feed(model, params, cache, tokens, lengths, run.limits)
  return decode(model, params, cache, logits, decoding, run)[0]


@functools.partial(
  jax.jit, static_argnames=("model", "decoding"), donate_argnames=("cache",)
)
def _converse(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  run: Run,
  *,
  decoding: Decoding,
) -> tuple[Answers, Cache]:
  logits, cache = _feed(model, params, cache, tokens, lengths, run.limits)
  return decode(model, params, cache, logits, decoding, run)


@functools.partial(jax.jit, static_argnames=("model", "decoding"))
def _complete(
  model: Model,
  params: PyTree,
  cache: Cache,
  logits: Float[Array, "B V"],
  run: Run,
  *,
  decoding: Decoding,
) -> Answers:
  cache = _roomy(cache, run.limits, 0, decoding)
  return decode(model, params, cache, logits, decoding, run)[0]


def _feed(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  limits: Limits | None,
) -> tuple[Float[Array, "B V"], Cache]:
  """Feeds a question, after which layers evict that go on evicting."""
  logits, cache = feed(model, params, cache, tokens, lengths, limits)
  return logits, cache if limits is None else evict_all(model, limits, cache)
