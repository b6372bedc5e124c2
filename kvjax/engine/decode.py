"""The compiled loop that decodes from a cache."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.cache.cache import Cache
from kvjax.engine.feed import evict_all, feed
from kvjax.engine.prepared import Limits
from kvjax.engine.sampling import GREEDY, Sampling, sample
from kvjax.errors import InputError
from kvjax.model import Model
from kvjax.struct import struct

# Called on the host with the step and every row's token at that step; -1 for
# rows that have ended.
OnToken = Callable[[int, np.ndarray], None]


# Programs are compiled for answers of multiples of so many tokens.
_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Decoding:
  """When and how decoding goes on.

  Attributes:
    max_new_tokens: most tokens per answer.
    stop_ids: a row ends before the first of these tokens.
    sampling: how a token is drawn.
  """

  max_new_tokens: int
  stop_ids: Sequence[int] = ()
  sampling: Sampling = GREEDY

  def __post_init__(self) -> None:
    # Lists are not hashable, and this is part of what is compiled.
    object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
    if self.max_new_tokens < 1:
      raise InputError(
        f"max_new_tokens must be 1 or more; {self.max_new_tokens} is not."
      )

  @property
  def rounded(self) -> "Decoding":
    """The same with room for so many tokens that few programs are compiled."""
    most = -(-self.max_new_tokens // _TOKENS) * _TOKENS
    return dataclasses.replace(self, max_new_tokens=most)


class Answers(NamedTuple):
  """What was decoded.

  Attributes:
    tokens: each row's tokens, then -1.
    lengths: tokens of each row, the stop token not counted.
  """

  tokens: Int[Array, "B M"]
  lengths: Int[Array, " B"]

  def rows(self) -> list[list[int]]:
    """The tokens as lists."""
    tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]


@struct
class Run:
  """What decoding takes besides a model, its cache and how to decode.

  Attributes:
    seeds: of each row's draws.
    listener: number of who is told of the tokens.
    limits: what the layers may hold, where they go on evicting.
    max_new_tokens: most tokens per answer, if they are fewer than those of
      `Decoding`, which the program is compiled for.
  """

  seeds: Int[Array, " B"]
  listener: Int[Array, ""] | None
  limits: Limits | None
  max_new_tokens: Int[Array, ""]


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
  run: Run,
) -> tuple[Answers, Cache]:
  """Decodes into the room that the cache has, until every row has ended."""
  seeds, listener, limits = run.seeds, run.listener, run.limits
  rows = seeds.shape[0]
  # Tokens between evictions; without any, all of them.
  every = (limits.plan.schedule.every if limits else None) or (
    decoding.max_new_tokens
  )

  def draw(
    logits: Float[Array, "B V"],
    positions: Int[Array, " B"],
    ended: Bool[Array, " B"],
  ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    token = sample(logits, decoding.sampling, seeds, positions)
    for stop in decoding.stop_ids:
      ended = ended | (token == stop)
    return token, ended

  def emit(loop: _Loop) -> Int[Array, "B M"]:
    shown = jnp.where(loop.ended, -1, loop.token)
    if listener is not None:
      io_callback(_tell, None, listener, loop.step, shown, ordered=True)
    return jax.lax.dynamic_update_slice_in_dim(
      loop.tokens, shown[:, None], loop.step, axis=1
    )

  def goes_on(loop: _Loop) -> Bool[Array, ""]:
    return (loop.step < run.max_new_tokens) & ~jnp.all(loop.ended)

  def one_token(loop: _Loop) -> _Loop:
    tokens = emit(loop)
    alive = (~loop.ended).astype(jnp.int32)
    logits, cache = feed(
      model, params, loop.cache, loop.token[:, None], alive, limits
    )
    token, ended = draw(logits, cache.next_positions, loop.ended)
    return _Loop(loop.step + 1, token, ended, tokens, cache)

  def until_eviction(loop: _Loop) -> _Loop:
    end = loop.step + every
    return jax.lax.while_loop(
      lambda now: goes_on(now) & (now.step < end), one_token, loop
    )

  def with_eviction(loop: _Loop) -> _Loop:
    # Also after the last tokens, if they are fewer: a row that ended early is
    # left as it is when it decodes alone.
    loop = until_eviction(loop)
    assert limits is not None
    return loop._replace(cache=evict_all(model, limits, loop.cache))

  token, ended = draw(logits, cache.next_positions, jnp.zeros(rows, bool))
  blank = jnp.full((rows, decoding.max_new_tokens), -1, jnp.int32)
  loop = _Loop(jnp.zeros((), jnp.int32), token, ended, blank, cache)
  if limits is None:
    loop = until_eviction(loop)
  else:
    loop = jax.lax.while_loop(goes_on, with_eviction, loop)
  lengths = jnp.sum((loop.tokens >= 0).astype(jnp.int32), axis=1)
  return Answers(loop.tokens, lengths), loop.cache


# Who listens to the decoding that runs, by number: programs are compiled with
# a number to fill in, not with a function.
_LISTENERS: dict[int, OnToken] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def listening(
  on_token: OnToken | None,
) -> Iterator[Int[Array, ""] | None]:
  """A number under which `decode` tells `on_token` of every token.

  All calls have been made when the context ends.
  """
  if on_token is None:
    yield None
    return
  number = next(_numbers)
  _LISTENERS[number] = on_token
  try:
    yield jnp.asarray(number, jnp.int32)
    jax.effects_barrier()
  finally:
    del _LISTENERS[number]


def _tell(listener: Any, step: Any, tokens: Any) -> None:
  _LISTENERS[int(listener)](int(step), np.asarray(tokens))
