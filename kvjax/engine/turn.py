"""What `generate` is asked for, checked before anything is compiled."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.cache import Cache
from kvjax.engine.capacity import check_prompts, check_room, prepare_decoding
from kvjax.engine.decode import Decoding
from kvjax.engine.prepared import PreparedPlan
from kvjax.errors import InputError
from kvjax.hosts import read
from kvjax.model import Model
from kvjax.prompts import Prompts

# One seed for each row's draws.
Seeds = Int[Array, " B"] | Int[np.ndarray, " B"] | Sequence[int]
# Tokens and lengths of the prompts to feed.
Feeds = tuple[Int[Array, "B S"], Int[Array, " B"]]


class Request(NamedTuple):
  """Arguments of `generate` for each cache."""

  prompts: Prompts | Float[Array, "B V"]
  decoding: Decoding
  keep: bool = False
  seeds: Seeds | None = None

  def repeat(self, times: int) -> "Request":
    """The request for the rows of so many caches in turn."""
    prompts, seeds = self.prompts, self.seeds
    return self._replace(
      prompts=prompts.repeat(times)
      if isinstance(prompts, Prompts)
      else jnp.tile(prompts, (times, 1)),
      seeds=None if seeds is None else np.tile(read(seeds), times),
    )


class Turn(NamedTuple):
  """A request that was checked for a cache."""

  decoding: Decoding
  keep: bool
  logits: Float[Array, "B V"] | None
  feeds: Feeds | None
  seeds: Int[Array, " B"]
  prepared: PreparedPlan | None


def check_request(model: Model, cache: Cache, request: Request) -> Turn:
  """Checks all that `generate` refuses, before anything is compiled.

  Raises:
    InputError: see `generate`.
  """
  prompts, decoding, keep, seeds = request
  logits, feeds = None, None
  if isinstance(prompts, Prompts):
    feeds = jnp.asarray(prompts.tokens), jnp.asarray(prompts.known_lengths)
  else:
    logits = prompts
  width = check_prompts(model, cache, prompts, decoding)
  # With evicted tokens: a retention is a share of all of the row.
  lengths = read(cache.next_positions)
  prepared = prepare_decoding(model, cache, lengths, width, decoding)
  if keep:
    check_room(cache, prepared, width, decoding)
  given = seeds_of_rows(seeds, cache)
  return Turn(decoding, keep, logits, feeds, given, prepared)


def seeds_of_rows(seeds: Seeds | None, cache: Cache) -> Int[Array, " B"]:
  """Checks the seeds of the rows of a cache; by default, their numbers.

  Raises:
    InputError: they are not one for each row, or do not fit 32 bits.
  """
  rows = cache.next_positions.shape
  if seeds is None:
    return jnp.arange(rows[0], dtype=jnp.int32)
  given = np.asarray(read(seeds))
  if given.shape != rows:
    raise InputError(
      f"The cache has {rows[0]} rows and {given.size} seeds; give one for each."
    )
  whole = given.dtype.kind in "iu"
  if not whole or np.any((given < -(2**31)) | (given >= 2**31)):
    raise InputError(
      f"Seeds must be whole numbers of 32 bits; {given.tolist()} are not."
    )
  return jnp.asarray(given, jnp.int32)
