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
from kvjax.engine.capacity import (
  check_prompts,
  check_room,
  find_limits,
  grow_for,
  wider_capacities,
)
from kvjax.engine.decode import (
  Answers,
  Decoding,
  OnToken,
  Run,
  decode,
  listening,
)
from kvjax.engine.feed import evict_all, feed
from kvjax.model import Model
from kvjax.prompts import Prompts

# One seed for each row's draws.
Seeds = Int[Array, " B"] | Int[np.ndarray, " B"]

_TOGETHER = "What the cache has seen, with question and answer,"


def reserve(cache: Cache, tokens: int) -> Cache:
  """The same cache with room for so many more tokens in every layer."""
  grown = cache.grow(wider_capacities(cache, tokens))
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
  width = check_prompts(model, cache, prompts, decoding)
  seen = np.asarray(cache.next_positions)
  limits = find_limits(cache, seen, width, decoding)
  if keep:
    check_room(cache, limits, width, decoding)
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


def _seeds(seeds: Seeds | None, cache: Cache) -> Int[Array, " B"]:
  if seeds is not None:
    return jnp.asarray(seeds, jnp.int32)
  return jnp.zeros(cache.next_positions.shape, jnp.int32)


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
  cache = grow_for(cache, run.limits, width, decoding)
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
