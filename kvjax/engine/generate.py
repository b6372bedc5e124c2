"""Asking caches: feed a question, then decode; all compiled."""

import contextvars
import functools
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.cache import Cache, join_key, stack
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


class Generated(NamedTuple):
  """What a cache has answered.

  Attributes:
    tokens: each row's tokens, then -1.
    lengths: tokens of each row, the stop token not counted.
    cache: with prompt and answer in it, where they stay; else None.
  """

  tokens: Int[Array, "B M"]
  lengths: Int[Array, " B"]
  cache: Cache | None = None

  def rows(self) -> list[list[int]]:
    """The tokens as lists."""
    tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


def generate(
  model: Model,
  params: PyTree,
  cache: Cache,
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
  *,
  keep: bool = False,
  seeds: Seeds | None = None,
) -> Generated:
  """Feeds a prompt to each row of a cache and decodes what follows.

  By default the cache is left as it was: ask it again, and the next question
  sees the same. With `keep`, prompt and answer stay in the cache for the next
  turn; the cache that is given is consumed, and needs room for both
  (`kvjax.reserve`). Where it goes on evicting to a budget in tokens, room for
  the padded prompt and `every` lasts for any number of turns.

  Where the cache's plan evicts while decoding, it does so after the prompt and
  after every so many tokens; a retention is then a share of what the row had
  seen before the prompt.

  Args:
    model: the functions.
    params: the weights.
    cache: what is left of each row's context.
    prompts: one for each row; their positions follow the uncompressed context.
      The logits that a prefill returned, in their place, go on right after it.
    decoding: when and how.
    keep: whether prompt and answer stay.
    seeds: of each row's draws; zeros if not given.

  Raises:
    InputError: rows and prompts differ in number, context, prompt and answer
      together are longer than the model's context, or the cache has too little
      room.

  Example:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, _ = kvjax.prefill(model, params, prompts, plan)
    >>> questions = kvjax.Prompts.of([[7], [8, 9]])
    >>> decoding = kvjax.Decoding(max_new_tokens=2)
    >>> answers = kvjax.generate(model, params, cache, questions, decoding)
    >>> answers.tokens.shape
    (2, 2)
  """
  return _generate(
    model, params, cache, _Request(prompts, decoding, keep, seeds)
  )


class _Request(NamedTuple):
  """What is asked of a cache; see `generate`."""

  prompts: Prompts | Float[Array, "B V"]
  decoding: Decoding
  keep: bool = False
  seeds: Seeds | None = None


def _generate(
  model: Model,
  params: PyTree,
  cache: Cache,
  request: _Request,
  on_token: OnToken | None = None,
) -> Generated:
  """Answers a request, and tells `on_token` of every token as it is made."""
  prompts, decoding, keep, seeds = request
  logits, feeds = None, None
  if isinstance(prompts, Prompts):
    feeds = jnp.asarray(prompts.tokens), jnp.asarray(prompts.lengths)
  else:
    logits = prompts
  width = _check_prompts(model, cache, prompts, decoding)
  seen = np.asarray(cache.next_positions)
  limits = _limits(cache, seen, width, decoding)
  if keep:
    _check_room(cache, limits, width, decoding)
  with listening(on_token) as listener:
    run = Run(_seeds(seeds, cache), listener, limits)
    program = _go_on if keep else _answer
    answers, after = program(
      model, params, cache, logits, feeds, run, decoding=decoding
    )
  return Generated(answers.tokens, answers.lengths, after)


def generate_all(
  model: Model,
  params: PyTree,
  caches: Sequence[Cache],
  prompts: Prompts,
  decoding: Decoding,
  *,
  seeds: Seeds | None = None,
) -> tuple[Generated, ...]:
  """Asks many caches of the same rows the same questions.

  Caches of equal sizes are joined (`kvjax.stack`) and decode together.

  Args:
    model: the functions.
    params: the weights.
    caches: of a sweep, say; they are left as they were.
    prompts: one for each row.
    decoding: when and how.
    seeds: of each row's draws, the same for all caches.

  Returns:
    The answers of each cache.

  Raises:
    InputError: see `generate`.
  """
  groups: dict[Any, list[int]] = {}
  for index, cache in enumerate(caches):
    groups.setdefault(join_key(cache), []).append(index)
  found: dict[int, Generated] = {}
  rows = prompts.tokens.shape[0]
  for group in groups.values():
    joined = stack([caches[index] for index in group])
    answers = generate(
      model,
      params,
      joined,
      prompts.repeated(len(group)),
      decoding,
      seeds=None if seeds is None else jnp.tile(jnp.asarray(seeds), len(group)),
    )
    for place, index in enumerate(group):
      own = slice(place * rows, (place + 1) * rows)
      found[index] = Generated(answers.tokens[own], answers.lengths[own])
  return tuple(found[index] for index in range(len(caches)))


def stream(
  model: Model,
  params: PyTree,
  cache: Cache,
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
  *,
  seeds: Seeds | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
  """Yields every row's next token as soon as it is made; -1 once it has ended.

  Arguments and errors are those of `generate`. Decoding is one compiled
  program all the same: it goes on whether or not its tokens are taken.
  """
  request = _Request(prompts, decoding, seeds=seeds)
  tokens: queue.SimpleQueue[Int[np.ndarray, " B"] | BaseException | None] = (
    queue.SimpleQueue()
  )

  def run() -> None:
    try:
      _generate(
        model, params, cache, request, lambda _, token: tokens.put(token)
      )
      tokens.put(None)
    except BaseException as error:  # handed to who takes the tokens
      tokens.put(error)

  # The mesh and the kernels that are chosen here hold there too.
  context = contextvars.copy_context()
  thread = threading.Thread(target=context.run, args=(run,), daemon=True)
  thread.start()
  while (token := tokens.get()) is not None:
    if isinstance(token, BaseException):
      raise token
    yield token
  thread.join()


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


def _check_prompts(
  model: Model,
  cache: Cache,
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
) -> int:
  """Refuses prompts that do not suit a cache; tokens that are fed otherwise."""
  seen = np.asarray(cache.next_positions)
  if not isinstance(prompts, Prompts):
    _check_reach(model, cache, seen + decoding.max_new_tokens, 0)
    return 0
  if prompts.protected is not None:
    raise InputError(
      "Tokens can be protected in what is prefilled only; give the question "
      "without a mask."
    )
  rows, asked = len(seen), prompts.tokens.shape[0]
  if rows != asked:
    raise InputError(
      f"The cache has {rows} rows and {asked} questions; give one for each."
    )
  width = prompts.tokens.shape[1]
  total = seen + np.asarray(prompts.lengths) + decoding.max_new_tokens
  _check_reach(model, cache, total, width)
  return width


def _check_room(
  cache: Cache, limits: Limits | None, width: int, decoding: Decoding
) -> None:
  """Refuses a cache without room for what is to stay."""
  cursors = jax.device_get([stack.next_slot for stack in cache.stacks])
  used = [int(cursor.max()) for cursor in cursors]
  needed = _needed(cache, used, limits, width, decoding)
  for layers, start, most in zip(cache.stacks, used, needed, strict=True):
    if layers.capacity is not None and most > layers.capacity:
      raise InputError(
        f"Turn and answer need {most - start} free slots and the cache has "
        f"{layers.capacity - start}; give it more with kvjax.reserve."
      )


# Tokens and lengths of what is fed.
_Feeds = tuple[Int[Array, "B S"], Int[Array, " B"]]


@functools.partial(jax.jit, static_argnames=("model", "decoding"))
def _answer(
  model: Model,
  params: PyTree,
  cache: Cache,
  logits: Float[Array, "B V"] | None,
  feeds: _Feeds | None,
  run: Run,
  *,
  decoding: Decoding,
) -> tuple[Answers, None]:
  width = 0 if feeds is None else feeds[0].shape[1]
  cache = _roomy(cache, run.limits, width, decoding)
  return _run(model, params, cache, logits, feeds, run, decoding)[0], None


@functools.partial(
  jax.jit, static_argnames=("model", "decoding"), donate_argnames=("cache",)
)
def _go_on(
  model: Model,
  params: PyTree,
  cache: Cache,
  logits: Float[Array, "B V"] | None,
  feeds: _Feeds | None,
  run: Run,
  *,
  decoding: Decoding,
) -> tuple[Answers, Cache]:
  return _run(model, params, cache, logits, feeds, run, decoding)


def _run(
  model: Model,
  params: PyTree,
  cache: Cache,
  logits: Float[Array, "B V"] | None,
  feeds: _Feeds | None,
  run: Run,
  decoding: Decoding,
) -> tuple[Answers, Cache]:
  """Feeds what is to be fed, evicts where that is due, and decodes."""
  if feeds is not None:
    logits, cache = feed(model, params, cache, *feeds, run.limits)
    if run.limits is not None:
      cache = evict_all(model, run.limits, cache)
  assert logits is not None
  return decode(model, params, cache, logits, decoding, run)
