"""Asking a cache: feed a question, then decode; all compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache import Cache
from kvjax.decoding import (
  Answers,
  Decoding,
  OnToken,
  decode,
  feed,
  listening,
)
from kvjax.errors import InputError
from kvjax.model import Model
from kvjax.prefilling import check_context
from kvjax.prompts import Prompts
from kvjax.sharding import shard_cache

# One seed for each row's draws.
Seeds = Int[Array, " B"] | Int[np.ndarray, " B"]

_TOGETHER = "What the cache has seen, with question and answer,"


def reserve(cache: Cache, tokens: int) -> Cache:
  """The same cache with room for so many more tokens in every layer."""
  layers = tuple(
    # Copied, so that a conversation can consume one cache and not the other.
    dataclasses.replace(
      shard_cache(layer.grown(tokens)), cursor=jnp.copy(layer.cursor)
    )
    for layer in cache.layers
  )
  return Cache(layers, jnp.copy(cache.next_positions))


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
  the same.

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
  _check_room(model, cache, questions, decoding)
  with listening(on_token) as listener:
    return _answer(
      model,
      params,
      cache,
      jnp.asarray(questions.tokens),
      jnp.asarray(questions.lengths),
      _seeds(seeds, cache),
      listener,
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

  The cache needs room for the padded turn and the answer (`reserve`); its
  buffers become those of the cache that is returned.

  Raises:
    InputError: as `answer`, or the cache has too little room.
  """
  _check_room(model, cache, turns, decoding)
  needed = turns.tokens.shape[1] + decoding.max_new_tokens
  room = min(x.capacity - int(x.cursor) for x in cache.layers)
  if needed > room:
    raise InputError(
      f"Turn and answer need {needed} free slots and the cache has {room}; "
      "give it more with kvjax.reserve."
    )
  with listening(on_token) as listener:
    return _converse(
      model,
      params,
      cache,
      jnp.asarray(turns.tokens),
      jnp.asarray(turns.lengths),
      _seeds(seeds, cache),
      listener,
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
  """Decodes right after a prefill, from the logits that it returned."""
  places = np.asarray(cache.next_positions)
  check_context(model, places + decoding.max_new_tokens, _TOGETHER)
  with listening(on_token) as listener:
    return _complete(
      model,
      params,
      cache,
      logits,
      _seeds(seeds, cache),
      listener,
      decoding=decoding,
    )


def _seeds(seeds: Seeds | None, cache: Cache) -> Int[Array, " B"]:
  if seeds is not None:
    return jnp.asarray(seeds, jnp.int32)
  return jnp.zeros(cache.next_positions.shape, jnp.int32)


def _check_room(
  model: Model, cache: Cache, questions: Prompts, decoding: Decoding
) -> None:
  rows = cache.next_positions.shape[0]
  asked = questions.tokens.shape[0]
  if rows != asked:
    raise InputError(
      f"The cache has {rows} rows and {asked} questions; give one for each."
    )
  total = np.asarray(cache.next_positions) + np.asarray(questions.lengths)
  check_context(model, total + decoding.max_new_tokens, _TOGETHER)


@functools.partial(jax.jit, static_argnames=("model", "decoding"))
def _answer(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  seeds: Int[Array, " B"],
  listener: Int[Array, ""] | None,
  *,
  decoding: Decoding,
) -> Answers:
  cache = reserve(cache, tokens.shape[1] + decoding.max_new_tokens)
  logits, cache = feed(model, params, cache, tokens, lengths)
  return decode(model, params, cache, logits, seeds, decoding, listener)[0]


@functools.partial(
  jax.jit, static_argnames=("model", "decoding"), donate_argnames=("cache",)
)
def _converse(
  model: Model,
  params: PyTree,
  cache: Cache,
  tokens: Int[Array, "B S"],
  lengths: Int[Array, " B"],
  seeds: Int[Array, " B"],
  listener: Int[Array, ""] | None,
  *,
  decoding: Decoding,
) -> tuple[Answers, Cache]:
  logits, cache = feed(model, params, cache, tokens, lengths)
  return decode(model, params, cache, logits, seeds, decoding, listener)


@functools.partial(jax.jit, static_argnames=("model", "decoding"))
def _complete(
  model: Model,
  params: PyTree,
  cache: Cache,
  logits: Float[Array, "B V"],
  seeds: Int[Array, " B"],
  listener: Int[Array, ""] | None,
  *,
  decoding: Decoding,
) -> Answers:
  cache = reserve(cache, decoding.max_new_tokens)
  return decode(model, params, cache, logits, seeds, decoding, listener)[0]
