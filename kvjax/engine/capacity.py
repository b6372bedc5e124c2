"""Number of slots that a prompt and its answer need, and checks of it."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.cache import Cache
from kvjax.engine.decode import (
  Decoding,
)
from kvjax.engine.prepared import Limits, max_span, prepare_limits
from kvjax.errors import InputError
from kvjax.model import Model, check_context
from kvjax.prompts import Prompts, bucket

_TOGETHER = "The context, with question and answer,"


def wider_capacities(cache: Cache, tokens: int) -> list[int | None]:
  """Capacities of the stacks with room for `tokens` more tokens."""
  return [
    None if stack.capacity is None else stack.capacity + tokens
    for stack in cache.stacks
  ]


def find_limits(
  cache: Cache, processed: Int[np.ndarray, " B"], width: int, decoding: Decoding
) -> Limits | None:
  """Limits of the layers during generation, if they evict then."""
  plan = cache.plan
  if plan is None or plan.keeps_prompts:
    return None
  longest = bucket(int(processed.max()) + width + decoding.max_new_tokens)
  return prepare_limits(plan, processed, longest)


def _slots_needed(
  cache: Cache,
  used: Sequence[int],
  limits: Limits | None,
  width: int,
  decoding: Decoding,
) -> list[int]:
  """Number of slots that the layers of each stack need.

  Args:
    cache: the cache.
    used: used slots of each stack.
    limits: limits of the layers after each eviction, if they evict.
    width: tokens of the block that is fed first; 0 for none.
    decoding: how many tokens follow.
  """
  full = [slots + width + decoding.max_new_tokens for slots in used]
  if limits is None:
    return full
  plan = limits.plan
  step = min(plan.schedule.every or 1, decoding.max_new_tokens)
  first = [cache.order.index(number) for number in range(len(used))]
  return [
    # A layer that never evicts never closes the gaps between rows either.
    total
    if plan.method.traits.keeps_layer(layer)
    else max(slots + (width or step), limits.capacity + step)
    for layer, slots, total in zip(first, used, full, strict=True)
  ]


def grow_for(
  cache: Cache, limits: Limits | None, width: int, decoding: Decoding
) -> Cache:
  """Grows a cache for a block and the tokens decoded after it.

  Arguments are those of `check_room`.
  """
  used = [stack.capacity or 0 for stack in cache.stacks]
  return cache.grow(_slots_needed(cache, used, limits, width, decoding))


def _check_lengths(
  model: Model, cache: Cache, lengths: Int[np.ndarray, " B"], width: int
) -> None:
  """Refuses rows whose final lengths exceed the model's context."""
  plan = cache.plan
  if plan is not None:
    block = max(width, plan.schedule.every or 1)
    lengths = max_span(plan, lengths, block)
  check_context(model, lengths, _TOGETHER)


def check_prompts(
  model: Model,
  cache: Cache,
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
) -> int:
  """Refuses prompts that do not fit a cache; returns their padded width."""
  processed = np.asarray(cache.next_positions)
  rows = len(processed)
  if not isinstance(prompts, Prompts):
    if len(prompts) != rows:
      raise InputError(
        f"The cache has {rows} rows and the logits {len(prompts)}; give those "
        "that its prefill returned."
      )
    _check_lengths(model, cache, processed + decoding.max_new_tokens, 0)
    return 0
  if prompts.protected is not None:
    raise InputError(
      "Tokens can be protected in what is prefilled only; give the question "
      "without a mask."
    )
  questions = prompts.tokens.shape[0]
  if rows != questions:
    raise InputError(
      f"The cache has {rows} rows and {questions} questions; give one for each."
    )
  width = prompts.tokens.shape[1]
  total = processed + np.asarray(prompts.lengths) + decoding.max_new_tokens
  _check_lengths(model, cache, total, width)
  return width


def check_room(
  cache: Cache, limits: Limits | None, width: int, decoding: Decoding
) -> None:
  """Refuses a cache that lacks room for the tokens that will stay in it.

  Args:
    cache: the cache.
    limits: limits of its layers, if they evict.
    width: tokens of the block, padding included; 0 for none.
    decoding: how many tokens follow.

  Raises:
    InputError: there are too few free slots.
  """
  cursors = jax.device_get([stack.next_slot for stack in cache.stacks])
  used = [int(cursor.max()) for cursor in cursors]
  needed = _slots_needed(cache, used, limits, width, decoding)
  for layers, start, total in zip(cache.stacks, used, needed, strict=True):
    if layers.capacity is not None and total > layers.capacity:
      raise InputError(
        f"Turn and answer need {total - start} free slots and the cache has "
        f"{layers.capacity - start}; give it more with kvjax.reserve."
      )
