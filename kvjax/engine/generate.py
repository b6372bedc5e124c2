"""Generation from caches: feed a prompt, then decode, all compiled."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.cache.joining import group_caches, stack_with_room, unstack
from kvjax.engine.capacity import (
  check_caches,
  check_prompts,
  grow_for,
  missing_slots,
)
from kvjax.engine.compiler_options import decoding_options
from kvjax.engine.decode import (
  DecodedTokens,
  Decoding,
  DecodingInputs,
  OnToken,
  decode,
  listening,
)
from kvjax.engine.evicting import evict_all
from kvjax.engine.feed import feed
from kvjax.engine.sampling import SamplingInputs
from kvjax.engine.turn import (
  Feeds,
  Request,
  Seeds,
  Turn,
  check_request,
  seeds_of_rows,
)
from kvjax.engine.unrolled import (
  Unrolled,
  UnrolledModel,
  layers_apart,
  roll_cache,
  unroll_cache,
)
from kvjax.hosts import is_traced, read
from kvjax.model import Model
from kvjax.options.bounds import check_count
from kvjax.prompts import Prompts
from kvjax.struct import tree_bytes


def reserve(cache: Cache, tokens: int) -> Cache:
  """Grows a cache by room for `tokens` more tokens in every layer.

  A prompt that follows takes as many slots as it is padded to, which is
  `prompts.tokens.shape[1]`: with `Prompts.of`, 32 or more unless `padded` is
  given. Its answer takes `max_new_tokens` more. On TPUs there is room for up to
  seven tokens beyond `tokens`, since slots come in groups of eight there.

  Raises:
    InputError: `tokens` is no whole number of 0 or more, or the cache has been
      donated.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, logits = kvjax.prefill(model, params, prompts, plan)
    >>> cache.layer(0).capacity
    3
    >>> kvjax.reserve(cache, 8).layer(0).capacity
    11
  """
  check_caches([cache])
  check_count("The number of tokens to reserve", tokens, 0)
  larger = cache.widen(operator.index(tokens))
  existing = {id(leaf) for leaf in jax.tree.leaves(cache)}
  # One of the caches may be donated, so they must not share arrays.
  return jax.tree.map(lambda x: jnp.copy(x) if id(x) in existing else x, larger)


class Generated(NamedTuple):
  """Generated tokens.

  Attributes:
    tokens: tokens of each row, then -1.
    lengths: number of tokens of each row, without the stop token.
    cache: the cache with prompt and answer if they stay in it, else None.
  """

  tokens: Int[Array, "B M"]
  lengths: Int[Array, " B"]
  cache: Cache | None = None

  def rows(self) -> list[list[int]]:
    """The tokens as lists."""
    tokens, lengths = read((self.tokens, self.lengths))
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


@overload
def generate(
  model: Model,
  params: PyTree,
  cache: Cache,
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
  *,
  keep: bool = False,
  seeds: Seeds | None = None,
) -> Generated: ...


@overload
def generate(
  model: Model,
  params: PyTree,
  cache: Sequence[Cache],
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
  *,
  keep: bool = False,
  seeds: Seeds | None = None,
) -> tuple[Generated, ...]: ...


def generate(
  model: Model,
  params: PyTree,
  cache: Cache | Sequence[Cache],
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
  *,
  keep: bool = False,
  seeds: Seeds | None = None,
) -> Generated | tuple[Generated, ...]:
  """Feeds a prompt to each row of a cache and decodes what follows.

  By default the cache is left unchanged and can be used again. With `keep`,
  prompt and answer stay in the cache for the next turn. The given cache is
  donated then, and needs room for both (`kvjax.reserve`). If it evicts to a
  budget in tokens while decoding, it never holds more than the budget, a padded
  prompt and `every` tokens: room for so many is sufficient for any number of
  turns.

  If the cache's plan evicts while decoding, it does so after the prompt, after
  every `every` tokens and after the last one. A retention is then a share of
  the row's length before the prompt.

  Given many caches of the same rows, such as those of a sweep, it generates
  from each of them with the same prompts. Caches of one kind are joined
  (`kvjax.stack`) and decode together, unless the smaller ones would need more
  bytes of empty slots than the weights have. With `keep`, only caches of equal
  sizes are joined; each has its own turn in it afterwards, and the given caches
  are not donated. Joined caches continue at the slot after the fullest, so they
  may need more room than alone.

  Args:
    model: the functions.
    params: the weights.
    cache: the cache of each row's context, or many of them.
    prompts: one prompt per row; their positions follow the uncompressed
      context. The logits that a prefill returned, given instead, continue the
      context directly.
    decoding: options of decoding.
    keep: whether prompt and answer stay in the cache.
    seeds: seeds of each row's draws, the same for all caches; by default, the
      numbers of the rows.

  Returns:
    The generated tokens; a tuple of them for many caches.

  Raises:
    InputError: an argument has a wrong type, there is no cache, rows, prompts
      and seeds differ in number, a seed does not fit 32 bits, the model does
      not embed a token, the cache is of another model or has been donated,
      context, prompt and answer together are longer than the model's context,
      the cache has too little room, or cache or prompts are arguments of
      `jax.jit`.

  Examples:
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
    >>> smaller = kvjax.get_plan("keydiff", kvjax.Tokens(2))
    >>> caches, _ = kvjax.sweep(model, params, prompts, [plan, smaller])
    >>> answers = kvjax.generate(model, params, caches, questions, decoding)
    >>> [answer.tokens.shape for answer in answers]
    [(2, 2), (2, 2)]
  """
  check_caches(cache)
  request = Request(prompts, decoding, keep, seeds)
  if isinstance(cache, Cache):
    turn = check_request(model, cache, request)
    return generate_from(model, params, cache, turn)
  return _generate_from_all(model, params, cache, request)


def generate_from(
  model: Model,
  params: PyTree,
  cache: Cache,
  turn: Turn,
  on_token: OnToken | None = None,
) -> Generated:
  """Generates, and passes every token to `on_token` as it is made."""
  decoding = turn.decoding
  with listening(on_token) as listener:
    limit = jnp.asarray(decoding.max_new_tokens, jnp.int32)
    sampling = SamplingInputs.of(decoding.sampling)
    inputs = DecodingInputs(
      turn.seeds, listener, turn.prepared, limit, sampling
    )
    program = _program(turn.keep, params)
    layers = layers_apart(model, params, decoding.max_new_tokens)
    # Compiled for the rounded number of tokens; `inputs` stop the loop.
    decoded, new_cache = program(
      model,
      params,
      layers,
      cache,
      turn.logits,
      turn.feeds,
      inputs,
      decoding=decoding.rounded,
    )
  tokens = decoded.tokens[:, : decoding.max_new_tokens]
  return Generated(tokens, decoded.lengths, new_cache)


def _generate_from_all(
  model: Model, params: PyTree, caches: Sequence[Cache], request: Request
) -> tuple[Generated, ...]:
  """Generates from many caches, those of one kind together."""
  # Before rows are repeated, so that messages count those that were given.
  width = check_prompts(model, caches[0], request.prompts, request.decoding)
  request = request._replace(seeds=seeds_of_rows(request.seeds, caches[0]))
  results: dict[int, Generated] = {}
  # Caches that are kept have no more slots than they need.
  padding = 0 if request.keep else tree_bytes(params)
  for group in group_caches(caches, padding):
    own = [caches[index] for index in group]
    answers = _generate_from_group(model, params, own, request, width)
    results.update(zip(group, answers, strict=True))
  return tuple(results[index] for index in range(len(caches)))


def _generate_from_group(
  model: Model,
  params: PyTree,
  caches: Sequence[Cache],
  request: Request,
  width: int,
) -> list[Generated]:
  """Generates from caches of one kind, which are joined.

  Without `keep`, nobody else has the joined cache: if it has room for all
  tokens, it is used up, and no program copies it to make room.
  """
  count, rows = len(caches), caches[0].next_positions.shape[0]
  room = width + request.decoding.rounded.max_new_tokens
  plan = caches[0].plan
  if request.keep or not (plan is None or plan.keeps_prompts):
    room = 0
  joined = stack_with_room(caches, room)
  # A single cache is returned itself, and `keep` donates it.
  if request.keep and count == 1:
    joined = jax.tree.map(jnp.copy, joined)
  turn = check_request(model, joined, request.repeat(count))
  if room and count > 1 and not is_traced(joined):
    needs = turn.prepared, width, turn.decoding.rounded
    turn = turn._replace(keep=not missing_slots(joined, *needs))
  answers = generate_from(model, params, joined, turn)
  kept: Sequence[Cache | None] = [None] * count
  if request.keep and answers.cache is not None:
    kept = unstack(answers.cache, count)
  parts = [slice(place * rows, (place + 1) * rows) for place in range(count)]
  return [
    Generated(answers.tokens[part], answers.lengths[part], own)
    for part, own in zip(parts, kept, strict=True)
  ]


def _program(
  keep: bool, params: PyTree
) -> Callable[..., tuple[DecodedTokens, Cache | None]]:
  """Returns the program that generates, and keeps or discards the cache."""
  program = _generate_and_keep if keep else _generate_and_discard
  options = decoding_options()
  # Within `jax.jit`, what it calls has no options of its own.
  if options is None or is_traced((params, jnp.zeros(()))):
    return program
  return _with_options(keep, **options)


@functools.cache
def _with_options(keep: bool, **options: bool | int) -> Any:
  """Returns one of the programs below with other options of the compiler."""
  program: Any = _generate_and_keep if keep else _generate_and_discard
  arguments = _KEEPING if keep else _DISCARDING
  return jax.jit(program.__wrapped__, **arguments, compiler_options=options)


_DISCARDING: Any = dict(static_argnames=("model", "decoding"))
_KEEPING: Any = dict(**_DISCARDING, donate_argnames=("cache",))


@functools.partial(jax.jit, **_DISCARDING)
def _generate_and_discard(
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
  # With the padding, which takes slots, too.
  width = 0 if feeds is None else feeds[0].shape[1]
  cache = grow_for(cache, inputs.prepared, width, decoding)
  decoded, _ = _run(
    model, params, layers, cache, logits, feeds, decoding, inputs
  )
  return decoded, None


@functools.partial(jax.jit, **_KEEPING)
def _generate_and_keep(
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
  return _run(model, params, layers, cache, logits, feeds, decoding, inputs)


def _run(
  model: Model,
  params: PyTree,
  layers: tuple[PyTree, ...] | None,
  cache: Cache,
  logits: Float[Array, "B V"] | None,
  feeds: Feeds | None,
  decoding: Decoding,
  inputs: DecodingInputs,
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
