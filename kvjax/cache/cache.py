"""The KV cache of a model, a pytree of layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.base import Layer
from kvjax.cache.sharding import shard_stack
from kvjax.errors import InputError
from kvjax.hosts import is_traced
from kvjax.kernels.layouts import whole_tiles
from kvjax.model import ranks
from kvjax.placement import nbytes_by_memory
from kvjax.struct import static, struct, tree_bytes


@struct
class Cache:
  """The KV cache of a whole model.

  Layers whose caches have the same sizes share a stack, with a leading axis of
  layers, so that a decoding step loops over them.

  Attributes:
    stacks: stacks of layers.
    next_positions: position of each row's next token: the number of tokens that
      the row has processed, kept or evicted.
    protected: by position, tokens that must not be evicted while decoding.
    order: for each layer of the model, the index of its stack, which contains
      its layers in the order of the model; -1 for a layer without a cache.
    plan: the `kvjax.Plan` that made the cache if it evicts while decoding, else
      None.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, logits = kvjax.prefill(model, params, prompts, plan)
    >>> cache.next_positions.tolist()
    [4, 2]
    >>> cache.lengths.shape  # layers, rows, KV heads
    (2, 2, 2)
  """

  stacks: tuple[Layer, ...]
  next_positions: Int[Array, " B"]
  protected: Bool[Array, "B P"] | None = None
  order: tuple[int, ...] = static(default=())
  plan: Any = static(default=None)

  @property
  def layers(self) -> tuple[Layer | None, ...]:
    """The cache of each layer, copied out of its stack.

    It takes as many bytes as the whole cache again; `layer` copies one.
    """
    return tuple(map(self.layer, range(len(self.order))))

  def layer(self, number: int) -> Layer | None:
    """The cache of one layer, copied out of its stack; None if it has none.

    Raises:
      InputError: there is no such layer.
    """
    last = len(self.order) - 1
    if not hasattr(number, "__index__") or not -last - 1 <= number <= last:
      raise InputError(
        f"There is no layer {number!r} of this cache; the layers are 0 to "
        f"{last}."
      )
    stack = self.order[number]
    if stack < 0:
      return None
    # A layer's place in its stack is the number of layers before it there.
    return self.stacks[stack].at(ranks(self.order)[number])

  @property
  def nbytes(self) -> int:
    """Allocated bytes."""
    return tree_bytes(self)

  @property
  def nbytes_by_memory(self) -> dict[str, int]:
    """Allocated bytes by kind of memory: "device" and "pinned_host"."""
    return nbytes_by_memory(self)

  def grow(self, capacities: Sequence[int | None]) -> "Cache":
    """Grows the stacks to at least the given capacities.

    On TPUs, a stack that grows has whole tiles afterwards, see `whole_tiles`.

    Args:
      capacities: slots per layer, for each stack; None leaves a stack as it is.
    """
    stacks = tuple(
      stack
      if capacity is None
      or stack.capacity is None
      or capacity <= stack.capacity
      else shard_stack(_grow(stack, capacity - stack.capacity))
      for stack, capacity in zip(self.stacks, capacities, strict=True)
    )
    return dataclasses.replace(self, stacks=stacks)

  def widen(self, tokens: int) -> "Cache":
    """Grows all stacks that grow by at least as many slots per layer."""
    capacities = [stack.capacity for stack in self.stacks]
    return self.grow([n if n is None else n + tokens for n in capacities])

  @property
  def lengths(self) -> Int[Array, "L B K"]:
    """Number of tokens per layer with a cache, row and KV head.

    Raises:
      InputError: layers have different numbers of KV heads; use
        `cache.layer(i)` then.
    """
    return self._by_layer(_lengths)

  @property
  def num_attended(self) -> Int[Array, "L B K"]:
    """Number of tokens that the next token attends to.

    It is given per layer, row and KV head. For retrieval layers, it counts the
    keys that the prompt's last token retrieved.
    """
    return self._by_layer(_num_attended)

  def _by_layer(
    self, count_tokens: Callable[[tuple[Layer, ...]], list[Array]]
  ) -> Int[Array, "L B K"]:
    counts = count_tokens(self.stacks)
    if len({count.shape[1:] for count in counts}) > 1:
      raise InputError(
        "Layers of this cache have different numbers of KV heads; count one "
        "at a time, as in cache.layer(0).lengths."
      )
    places = zip(self.order, ranks(self.order), strict=True)
    return jnp.stack([counts[s][i] for s, i in places if s >= 0])


def _grow(stack: Layer, extra: int) -> Layer:
  """Adds `extra` slots to a stack, and those that its tiles lack."""
  assert stack.capacity is not None
  own = stack.capacity - stack.fixed_slots
  return stack.grow(whole_tiles(own + extra) - own)


def check_not_donated(cache: Cache) -> None:
  """Refuses a cache whose arrays are gone.

  Raises:
    InputError: they have been donated, as by a turn with keep=True.
  """
  gone = any(
    isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted()
    for leaf in jax.tree.leaves(cache)
  )
  if gone:
    raise InputError(
      "This cache's arrays have been donated, as a turn with keep=True does; "
      "continue with the cache that it returned, or keep a copy before it, as "
      "jax.tree.map(jnp.copy, cache) makes one."
    )


# Compiled, since operations one by one would each be a program.
_lengths = jax.jit(lambda stacks: [stack.lengths for stack in stacks])
_num_attended = jax.jit(lambda stacks: [stack.num_attended for stack in stacks])
