"""How many slots a prompt and its answer need, and whether they are there."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.cache import Cache
from kvjax.engine.decode import (
  Decoding,
)
from kvjax.engine.prepared import Limits, farthest, prepare_limits
from kvjax.errors import InputError
from kvjax.model import Model, check_context
from kvjax.options.budgets import Retention
from kvjax.prompts import Prompts, bucket

# One seed for each row's draws.
Seeds = Int[Array, " B"] | Int[np.ndarray, " B"]

_TOGETHER = "What the cache has seen, with question and answer,"


def wider_capacities(cache: Cache, tokens: int) -> list[int | None]:
  """Capacities of the stacks with room for so many more tokens."""
  return [
    None if stack.capacity is None else stack.capacity + tokens
    for stack in cache.stacks
  ]


def find_limits(
  cache: Cache, seen: Int[np.ndarray, " B"], width: int, decoding: Decoding
) -> Limits | None:
  """What the layers may hold while they are asked, if they evict then."""
  plan = cache.plan
  if plan is None or plan.budget == Retention(1.0):
    return None
  most = bucket(int(seen.max()) + width + decoding.max_new_tokens)
  return prepare_limits(plan, seen, most)


def _slots_needed(
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


def grow_for(
  cache: Cache, limits: Limits | None, width: int, decoding: Decoding
) -> Cache:
  """The cache with room for a block and what is decoded after it.

  Arguments are those of `check_room`.
  """
  used = [stack.capacity or 0 for stack in cache.stacks]
  return cache.grow(_slots_needed(cache, used, limits, width, decoding))


def _check_reach(
  model: Model, cache: Cache, lengths: Int[np.ndarray, " B"], width: int
) -> None:
  """Refuses rows of these lengths in the end, fed by so many at a time."""
  plan = cache.plan
  if plan is not None:
    block = max(width, plan.schedule.every or 1)
    lengths = farthest(plan, lengths, block)
  check_context(model, lengths, _TOGETHER)


def check_prompts(
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


def check_room(
  cache: Cache, limits: Limits | None, width: int, decoding: Decoding
) -> None:
  """Refuses a cache without room for what is to stay.

  Args:
    cache: what a block is appended to.
    limits: what its layers may hold, if they evict.
    width: tokens of the block, padding included; 0 for none.
    decoding: how many tokens follow.

  Raises:
    InputError: there are too few free slots.
  """
  cursors = jax.device_get([stack.next_slot for stack in cache.stacks])
  used = [int(cursor.max()) for cursor in cursors]
  needed = _slots_needed(cache, used, limits, width, decoding)
  for layers, start, most in zip(cache.stacks, used, needed, strict=True):
    if layers.capacity is not None and most > layers.capacity:
      raise InputError(
        f"Turn and answer need {most - start} free slots and the cache has "
        f"{layers.capacity - start}; give it more with kvjax.reserve."
      )
