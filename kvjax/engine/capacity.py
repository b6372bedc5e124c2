"""Number of slots that a prompt and its answer need, and checks of it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.base import LayerSizes
from kvjax.cache.cache import Cache, check_not_donated
from kvjax.engine.decode import Decoding, check_decoding
from kvjax.engine.prepared import PreparedPlan
from kvjax.engine.preparing import max_span, prepare_repeated
from kvjax.errors import InputError
from kvjax.hosts import read
from kvjax.model import (
  Model,
  Vocabulary,
  check_context,
  check_model,
  check_tokens,
)
from kvjax.options.bounds import check_count
from kvjax.prompts import Prompts, bucket, check_unprotected

_TOGETHER = "The context, with question and answer,"


def prepare_decoding(
  model: Model,
  cache: Cache,
  processed: Int[np.ndarray, " B"],
  width: int,
  decoding: Decoding,
) -> PreparedPlan | None:
  """Prepares the plan of a cache that evicts during generation, if it does.

  Args:
    model: the model.
    cache: the cache.
    processed: tokens of each row so far.
    width: tokens of the block that is fed first; 0 for none.
    decoding: how many tokens follow.

  Raises:
    InputError: the files of the plan's method are of another model.
  """
  plan = cache.plan
  if plan is None or plan.keeps_prompts:
    return None
  plan.method.check_model(model.geometry)
  # The parts, not their sum: rows of one bucket then share programs.
  padded = bucket(int(processed.max()))
  longest = padded + width + decoding.rounded.max_new_tokens
  return prepare_repeated(plan, processed, longest, model.geometry)


def _slots_needed(
  cache: Cache,
  used: Sequence[int],
  prepared: PreparedPlan | None,
  width: int,
  decoding: Decoding,
) -> list[int]:
  """Number of slots that the layers of each stack need.

  Args:
    cache: the cache.
    used: used slots of each stack.
    prepared: the plan, if layers evict.
    width: tokens of the block that is fed first; 0 for none.
    decoding: how many tokens follow.
  """
  full = [slots + width + decoding.max_new_tokens for slots in used]
  if prepared is None:
    return full
  # First the block, next to all that is there; after its eviction, at most
  # `step` tokens between two evictions. Never more than all tokens.
  step = min(prepared.plan.schedule.every or 1, decoding.max_new_tokens)
  first = [cache.order.index(number) for number in range(len(used))]
  return [
    # A layer that never evicts never closes the gaps between rows either.
    min(total, max(slots + (width or step), prepared.capacity + step))
    if prepared.compressed[layer]
    else total
    for layer, slots, total in zip(first, used, full, strict=True)
  ]


def grow_for(
  cache: Cache, prepared: PreparedPlan | None, width: int, decoding: Decoding
) -> Cache:
  """Grows a cache for a block and the tokens decoded after it.

  Arguments are those of `check_room`.
  """
  # Within the program no cursor is known; the capacity bounds it.
  used = [stack.capacity or 0 for stack in cache.stacks]
  return cache.grow(_slots_needed(cache, used, prepared, width, decoding))


def decoding_nbytes(
  model: Model, cache: Cache, width: int, decoding: Decoding
) -> int:
  """Computes the bytes that a cache takes while `generate` decodes from it.

  Args:
    model: the functions.
    cache: the cache of each row's context.
    width: tokens of the padded prompts; 0 if logits are continued.
    decoding: options of decoding.

  Raises:
    InputError: the cache is of another model, or `width` no whole number.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(2))
    >>> cache, _ = kvjax.prefill(model, params, prompts, plan)
    >>> decoding = kvjax.Decoding(max_new_tokens=30)
    >>> cache.nbytes < kvjax.decoding_nbytes(model, cache, 0, decoding)
    True
  """
  check_caches([cache])
  check_cache(model, cache)
  check_count("width", width, 0)
  check_decoding(decoding)
  lengths = read(cache.next_positions)
  prepared = prepare_decoding(model, cache, lengths, width, decoding)
  grown = jax.eval_shape(
    lambda cache: grow_for(cache, prepared, width, decoding.rounded), cache
  )
  return grown.nbytes


def _check_lengths(
  model: Model, cache: Cache, lengths: Int[np.ndarray, " B"], width: int
) -> None:
  """Refuses rows whose final lengths exceed the model's context."""
  plan = cache.plan
  if plan is not None:
    block = max(width, plan.schedule.every or 1)
    lengths = max_span(plan, lengths, block)
  check_context(model, lengths, _TOGETHER)


def check_caches(caches: Any) -> None:
  """Refuses anything but caches, no cache at all, and donated caches.

  Raises:
    InputError: it is one of these.
  """
  many = caches if isinstance(caches, Sequence) else [caches]
  if not many:
    raise InputError("There is nothing to continue; give at least one cache.")
  if not all(isinstance(cache, Cache) for cache in many):
    raise InputError(
      "What follows a context follows its kvjax.Cache; take it out of the pair "
      "that kvjax.prefill returns, as in `cache, logits = kvjax.prefill(...)`."
    )
  for cache in many:
    check_not_donated(cache)


def check_cache(model: Model, cache: Cache) -> None:
  """Refuses a cache of a model with other layers.

  Raises:
    InputError: it has another number of layers, heads of other numbers or
      sizes, or other windows, or the model is not a kvjax.Model.
  """
  check_model(model)
  layers = model.geometry.layers
  if len(cache.order) != len(layers):
    raise InputError(
      f"The cache has {len(cache.order)} layers and the model {len(layers)}; "
      "use the model that made it."
    )
  found = [stack.sizes for stack in cache.stacks]
  for layer, (spec, stack) in enumerate(zip(layers, cache.order, strict=True)):
    sizes = None if stack < 0 else found[stack]
    expected = [
      LayerSizes(heads, spec.key_dim, spec.value_width, spec.window)
      for heads in (spec.kv_heads, spec.heads)
    ]
    if sizes not in (expected if spec.cache else [None]):
      in_model = expected[0] if spec.cache else None
      raise InputError(
        f"Layer {layer} has {_describe(sizes)} in the cache and "
        f"{_describe(in_model)} in the model; use the model that made it."
      )


def _describe(sizes: LayerSizes | None) -> str:
  if sizes is None:
    return "no keys"
  window = sizes.window
  within = "" if window is None else f", in a window of {window},"
  return (
    f"{sizes.kv_heads} KV heads of widths {sizes.key_width} and "
    f"{sizes.value_width}{within}"
  )


def check_prompts(
  model: Model,
  cache: Cache,
  prompts: Prompts | Float[Array, "B V"],
  decoding: Decoding,
) -> int:
  """Refuses prompts that do not fit a cache; returns their padded width.

  Raises:
    InputError: something has the wrong type, the cache is of another model,
      rows differ in number, a token is none of the model's, or context, prompt
      and answer are longer than the model's context.
  """
  check_decoding(decoding)
  check_cache(model, cache)
  # A sum of the next lines may not fit 32 bits.
  lengths = read(cache.next_positions).astype(np.int64)
  rows, width = len(lengths), 0
  if isinstance(prompts, Prompts):
    check_unprotected(prompts)
    questions, width = prompts.tokens.shape
    if rows != questions:
      raise InputError(
        f"The cache has {rows} rows and {questions} questions; give one for "
        "each."
      )
    check_tokens(model, prompts.tokens, prompts.known_lengths)
    lengths = lengths + prompts.known_lengths
  else:
    _check_logits(model, prompts, rows)
  _check_lengths(model, cache, lengths + decoding.max_new_tokens, width)
  return width


def _check_logits(model: Model, logits: Any, rows: int) -> None:
  """Refuses what is no prefill's logits, given to continue these rows."""
  if isinstance(logits, list | tuple | str) or np.ndim(logits) != 2:
    raise InputError(
      "What follows a cache is kvjax.Prompts, or the logits that its prefill "
      f"returned; a {type(logits).__name__} is neither: make prompts of lists "
      "of tokens with kvjax.Prompts.of."
    )
  if len(logits) != rows:
    raise InputError(
      f"The cache has {rows} rows and the logits {len(logits)}; give those "
      "that its prefill returned."
    )
  width = np.shape(logits)[1]
  if isinstance(model, Vocabulary) and width != model.vocab_size:
    raise InputError(
      f"The logits are of {width} tokens and the model has "
      f"{model.vocab_size}; give those that its prefill returned."
    )


def missing_slots(
  cache: Cache, prepared: PreparedPlan | None, width: int, decoding: Decoding
) -> int:
  """Slots that a layer lacks at most for a turn; arguments of `check_room`."""
  spare = [
    layers.capacity - total
    for layers, (_, total) in zip(
      cache.stacks, _turns(cache, prepared, width, decoding), strict=True
    )
    if layers.capacity is not None
  ]
  return max(-min(spare, default=0), 0)


def check_room(
  cache: Cache, prepared: PreparedPlan | None, width: int, decoding: Decoding
) -> None:
  """Refuses a cache that lacks room for the tokens that will stay in it.

  Args:
    cache: the cache.
    prepared: the plan, if layers evict.
    width: tokens of the block, padding included; 0 for none.
    decoding: how many tokens follow.

  Raises:
    InputError: there are too few free slots.
  """
  turns = _turns(cache, prepared, width, decoding)
  for layers, (start, total) in zip(cache.stacks, turns, strict=True):
    if layers.capacity is not None and total > layers.capacity:
      padded = f": the prompt takes {width} with its padding" if width else ""
      raise InputError(
        f"Turn and answer need {total - start} free slots and the cache has "
        f"{layers.capacity - start}{padded}; give it more with kvjax.reserve."
      )


def _turns(
  cache: Cache, prepared: PreparedPlan | None, width: int, decoding: Decoding
) -> list[tuple[int, int]]:
  """Used slots of each stack, and those that it needs for a turn."""
  # One transfer for all stacks.
  cursors = read([stack.next_slot for stack in cache.stacks])
  used = [int(cursor.max()) for cursor in cursors]
  needed = _slots_needed(cache, used, prepared, width, decoding)
  return list(zip(used, needed, strict=True))
