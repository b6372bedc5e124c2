"""The compiled programs that generate: feed prompts, then decode."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.cache.joining import needs_one_program, stack
from kvjax.engine.ahead import Call, compile_together
from kvjax.engine.capacity import grow_for
from kvjax.engine.compiler_options import decoding_options
from kvjax.engine.decode import DecodedTokens, Decoding, DecodingInputs, decode
from kvjax.engine.feed import evict_all, feed
from kvjax.engine.sampling import SamplingInputs
from kvjax.engine.turn import Feeds, Request, Turn, check_request
from kvjax.engine.unrolled import (
  Unrolled,
  UnrolledModel,
  layers_apart,
  roll_cache,
  unroll_cache,
)
from kvjax.hosts import is_traced
from kvjax.model import Model


def generation(
  model: Model,
  params: PyTree,
  cache: Cache,
  turn: Turn,
  listener: Int[Array, ""] | None = None,
) -> Call:
  """The call that generates.

  Args:
    model: the functions.
    params: the weights.
    cache: the cache, or its shapes.
    turn: the request.
    listener: number of the callback that receives tokens, if there is one.
  """
  decoding = turn.decoding
  limit = jnp.asarray(decoding.max_new_tokens, jnp.int32)
  sampling = SamplingInputs.of(decoding.sampling)
  return Call(
    _program(turn.keep, params),
    dict(
      params=params,
      layers=layers_apart(model, params, decoding.max_new_tokens),
      cache=cache,
      logits=turn.logits,
      feeds=turn.feeds,
      inputs=DecodingInputs(
        turn.seeds, listener, turn.prepared, limit, sampling
      ),
    ),
    # Compiled for the rounded number of tokens; `inputs` stop the loop.
    dict(model=model, decoding=decoding.rounded),
  )


def compile_generation(
  model: Model,
  params: PyTree,
  groups: Sequence[Sequence[Cache]],
  request: Request,
) -> None:
  """Compiles what generates from groups of caches, all groups together.

  Groups that evict while decoding, or lie on several devices, are left to be
  compiled when they decode.

  Args:
    model: the functions.
    params: the weights.
    groups: caches of the same rows, which are to be joined.
    request: what each cache is asked for.
  """

  def calls() -> Iterator[Call]:
    for group in groups:
      turn = check_request(model, group[0], request)
      if turn.prepared is None and not any(map(needs_one_program, group)):
        joined = _shapes_joined(group)
        yield generation(model, params, joined, turn.repeated(len(group)))

  if len(groups) > 1:
    compile_together(calls())


def _shapes_joined(group: Sequence[Cache]) -> Cache:
  """Shapes of joined caches, on the device that any of them is committed to."""
  if len(group) == 1:
    return group[0]
  joined = jax.eval_shape(lambda *caches: stack(caches), *group)
  committed = [leaf for leaf in jax.tree.leaves(group) if leaf.committed]
  sharding = committed[0].sharding if committed else None
  shapes: Cache = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), joined
  )
  return shapes


def _program(
  keep: bool, params: PyTree
) -> Callable[..., tuple[DecodedTokens, Cache | None]]:
  """Returns the program that generates, and keeps or discards the cache."""
  program = generate_and_keep if keep else generate_and_discard
  options = decoding_options()
  # Within `jax.jit`, what it calls has no options of its own.
  if options is None or is_traced((params, jnp.zeros(()))):
    return program
  return _with_options(keep, **options)


@functools.cache
def _with_options(keep: bool, **options: bool | int) -> Any:
  """Returns one of the programs below with other options of the compiler."""
  program: Any = generate_and_keep if keep else generate_and_discard
  arguments = _KEEPING if keep else _DISCARDING
  return jax.jit(program.__wrapped__, **arguments, compiler_options=options)


_DISCARDING: Any = dict(static_argnames=("model", "decoding"))
_KEEPING: Any = dict(**_DISCARDING, donate_argnames=("cache",))


@functools.partial(jax.jit, **_DISCARDING)
def generate_and_discard(
  model: Model,
  params: PyTree,
  layers: tuple[PyTree, ...] | None,
  cache: Cache,
  logits: Float[Array, "B V"] | None,
  feeds: Feeds | None,
  inputs: DecodingInputs,
  *,
  decoding: Decoding,
) -> tuple[DecodedTokens, None]:
  """Generates from a copy of the cache, which grows by the room it needs."""
  # With the padding, which takes slots, too.
  width = 0 if feeds is None else feeds[0].shape[1]
  cache = grow_for(cache, inputs.prepared, width, decoding)
  return _run(model, params, layers, cache, logits, feeds, inputs, decoding)[
    0
  ], None


@functools.partial(jax.jit, **_KEEPING)
def generate_and_keep(
  model: Model,
  params: PyTree,
  layers: tuple[PyTree, ...] | None,
  cache: Cache,
  logits: Float[Array, "B V"] | None,
  feeds: Feeds | None,
  inputs: DecodingInputs,
  *,
  decoding: Decoding,
) -> tuple[DecodedTokens, Cache]:
  """Generates in the cache, which has room; it is donated."""
  return _run(model, params, layers, cache, logits, feeds, inputs, decoding)


def _run(
  model: Model,
  params: PyTree,
  layers: tuple[PyTree, ...] | None,
  cache: Cache,
  logits: Float[Array, "B V"] | None,
  feeds: Feeds | None,
  inputs: DecodingInputs,
  decoding: Decoding,
) -> tuple[DecodedTokens, Cache]:
  """Feeds the prompts, evicts if due, and decodes.

  With the weights of `layers`, the layers are decoded without a loop.
  """
  if feeds is not None:
    logits, cache = feed(model, params, cache, *feeds, inputs.prepared)
    if inputs.prepared is not None:
      cache = evict_all(model, inputs.prepared, cache)
  assert logits is not None
  if layers is None:
    return decode(model, params, cache, logits, decoding, inputs)
  unrolled, weights = UnrolledModel.of(model), Unrolled(params, layers)
  order, cache = cache.order, unroll_cache(cache)
  decoded, cache = decode(unrolled, weights, cache, logits, decoding, inputs)
  return decoded, roll_cache(cache, order)
