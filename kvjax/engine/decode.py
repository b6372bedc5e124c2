"""The compiled loop that decodes from a cache."""

import contextlib
import dataclasses
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.engine.evicting import evict_all
from kvjax.engine.feed import feed
from kvjax.engine.prepared import PreparedPlan
from kvjax.engine.sampling import GREEDY, Sampling, SamplingInputs, sample
from kvjax.errors import InputError
from kvjax.model import Model
from kvjax.options.bounds import check_count
from kvjax.struct import struct

# Called on the host with the step and every row's token at that step; -1 for
# rows that have ended.
OnToken = Callable[[int, Int[np.ndarray, " B"]], None]


# Programs are compiled for answers of multiples of so many tokens.
_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Decoding:
  """Options of decoding.

  Raises InputError if `max_new_tokens` is no whole number of 1 or more, or
  `stop_ids` or `sampling` have the wrong type.

  Attributes:
    max_new_tokens: maximum number of tokens to generate per row.
    stop_ids: a row ends before the first of these tokens.
    sampling: how a token is drawn.

  Examples:
    >>> import kvjax
    >>> kvjax.Decoding(max_new_tokens=8, stop_ids=[2]).stop_ids
    (2,)
  """

  max_new_tokens: int
  stop_ids: Sequence[int] = ()
  sampling: Sampling = GREEDY

  def __post_init__(self) -> None:
    stops: Any = self.stop_ids
    if isinstance(stops, str) or not isinstance(stops, Iterable):
      raise InputError(f"stop_ids must be a list of tokens, not {stops!r}.")
    # Lists and arrays are not hashable, and this is part of what is compiled.
    object.__setattr__(self, "stop_ids", tuple(map(_stop_id, stops)))
    check_count("max_new_tokens", self.max_new_tokens)
    object.__setattr__(
      self, "max_new_tokens", operator.index(self.max_new_tokens)
    )
    sampling: Any = self.sampling
    if not isinstance(sampling, Sampling):
      raise InputError(
        "Tokens are drawn by a kvjax.Sampling, which is greedy by default; "
        f"{sampling!r} is not one."
      )

  @property
  def rounded(self) -> "Decoding":
    """What few programs are compiled for: `DecodingInputs` has the rest.

    It has room for more tokens, and nothing about how they are drawn.
    """
    most = -(-self.max_new_tokens // _TOKENS) * _TOKENS
    return dataclasses.replace(self, max_new_tokens=most, sampling=GREEDY)


def check_decoding(decoding: Any) -> None:
  """Refuses what is no `Decoding`, for callers without a type checker.

  Raises:
    InputError: it is none.
  """
  if not isinstance(decoding, Decoding):
    raise InputError(
      "Options of decoding are those of kvjax.Decoding, as in "
      f"kvjax.Decoding(max_new_tokens=64); {decoding!r} is not one."
    )


def _stop_id(token: Any) -> int:
  try:
    # Integers of arrays pass, too.
    value = operator.index(token)
  except TypeError:
    value = None
  if value is None or not -(2**31) <= value < 2**31:
    raise InputError(
      f"stop_ids must be token ids, as in [2]; {token!r} is not one."
    )
  return value


class DecodedTokens(NamedTuple):
  """Decoded tokens.

  Attributes:
    tokens: tokens of each row, then -1.
    lengths: number of tokens of each row, without the stop token.
  """

  tokens: Int[Array, "B M"]
  lengths: Int[Array, " B"]


@struct
class DecodingInputs:
  """Inputs of decoding besides the model, the cache and the options.

  Attributes:
    seeds: seeds of each row's draws.
    listener: number of the callback that receives tokens, if there is one.
    prepared: the plan, if layers evict while decoding.
    max_new_tokens: maximum number of tokens to generate per row; the program
      is compiled for a `Decoding` that may allow more.
    sampling: how a token is drawn, whatever that `Decoding` says; the most
      likely one by default.
  """

  seeds: Int[Array, " B"]
  listener: Int[Array, ""] | None
  prepared: PreparedPlan | None
  max_new_tokens: Int[Array, ""]
  sampling: SamplingInputs = SamplingInputs()


class _Loop(NamedTuple):
  step: Int[Array, ""]
  token: Int[Array, " B"]
  ended: Bool[Array, " B"]
  tokens: Int[Array, "B M"]
  cache: Cache


def decode(
  model: Model,
  params: PyTree,
  cache: Cache,
  logits: Float[Array, "B V"],
  decoding: Decoding,
  inputs: DecodingInputs,
) -> tuple[DecodedTokens, Cache]:
  """Decodes until every row has ended; the cache must have room."""
  seeds, listener, prepared = inputs.seeds, inputs.listener, inputs.prepared
  rows = seeds.shape[0]
  # Tokens between evictions; all tokens if there are none.
  every = (prepared.plan.schedule.every if prepared else None) or (
    decoding.max_new_tokens
  )

  def draw(
    logits: Float[Array, "B V"],
    positions: Int[Array, " B"],
    ended: Bool[Array, " B"],
  ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    token = sample(logits, inputs.sampling, seeds, positions)
    for stop in decoding.stop_ids:
      ended = ended | (token == stop)
    return token, ended

  def emit(loop: _Loop) -> Int[Array, "B M"]:
    # The step that draws a stop token ends the row, so it is never emitted.
    emitted = jnp.where(loop.ended, -1, loop.token)
    if listener is not None:
      # JAX cannot order callbacks of a program whose results are on the host.
      io_callback(_notify, None, listener, loop.step, emitted)
    return jax.lax.dynamic_update_slice_in_dim(
      loop.tokens, emitted[:, None], loop.step, axis=1
    )

  def unfinished(loop: _Loop) -> Bool[Array, ""]:
    # The limit is an argument; `decoding` has it rounded up, for the shapes.
    return (loop.step < inputs.max_new_tokens) & ~jnp.all(loop.ended)

  def one_token(loop: _Loop) -> _Loop:
    tokens = emit(loop)
    # An ended row feeds padding: its tokens and positions stay as they are.
    active = (~loop.ended).astype(jnp.int32)
    block = loop.token[:, None]
    logits, cache = feed(
      model, params, loop.cache, block, active, prepared, decoded=True
    )
    # Ended rows go on drawing; `emit` replaces their tokens by -1.
    token, ended = draw(logits, cache.next_positions, loop.ended)
    return _Loop(loop.step + 1, token, ended, tokens, cache)

  def until_eviction(loop: _Loop) -> _Loop:
    end = loop.step + every
    return jax.lax.while_loop(
      lambda now: unfinished(now) & (now.step < end), one_token, loop
    )

  def with_eviction(loop: _Loop) -> _Loop:
    # Also after a last, shorter run of tokens: a row must end in the same state
    # whether it decodes alone or in a batch.
    loop = until_eviction(loop)
    assert prepared is not None
    return loop._replace(cache=evict_all(model, prepared, loop.cache))

  token, ended = draw(logits, cache.next_positions, jnp.zeros(rows, bool))
  no_tokens = jnp.full((rows, decoding.max_new_tokens), -1, jnp.int32)
  loop = _Loop(jnp.zeros((), jnp.int32), token, ended, no_tokens, cache)
  if prepared is None:
    loop = until_eviction(loop)
  else:
    loop = jax.lax.while_loop(unfinished, with_eviction, loop)
  lengths = jnp.sum(loop.tokens >= 0, axis=1, dtype=jnp.int32)
  return DecodedTokens(loop.tokens, lengths), loop.cache


class _Listener:
  """Calls a function for the steps of a decoding in their order."""

  def __init__(self, on_token: OnToken) -> None:
    self._on_token = on_token
    self._next = 0
    self._early: dict[int, Int[np.ndarray, " B"]] = {}
    # XLA may call from several threads.
    self._lock = threading.Lock()

  def hear(self, step: int, tokens: Int[np.ndarray, " B"]) -> None:
    """Passes on a step, and those that came before it was there."""
    with self._lock:
      self._early[step] = tokens
      while self._next in self._early:
        self._on_token(self._next, self._early.pop(self._next))
        self._next += 1


# Listeners to running decodings by number. A compiled program takes the number
# as an argument, so that it does not depend on a function.
_LISTENERS: dict[int, _Listener] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def listening(on_token: OnToken | None) -> Iterator[Int[Array, ""] | None]:
  """Registers a callback for every decoded token; yields its number.

  All calls have returned when the context ends.
  """
  if on_token is None:
    yield None
    return
  number = next(_numbers)
  _LISTENERS[number] = _Listener(on_token)
  try:
    yield jnp.asarray(number, jnp.int32)
    # Callbacks may still be running when the program's results are there.
    jax.effects_barrier()
  finally:
    del _LISTENERS[number]


def _notify(listener: Any, step: Any, tokens: Any) -> None:
  _LISTENERS[int(listener)].hear(int(step), np.asarray(tokens))
