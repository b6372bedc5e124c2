"""The KV cache of a model: a plain pytree of layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.base import Layer
from kvjax.cache.sharding import shard_stack
from kvjax.errors import InputError
from kvjax.model import ranks
from kvjax.placement import nbytes_by_memory
from kvjax.struct import static, struct, tree_bytes


@struct
class Cache:
  """The cache of a whole model.

  Layers whose caches have the same sizes are joined to stacks, one class with
  a leading axis of layers, so that a decoding step loops over them.

  Attributes:
    stacks: of layers.
    next_positions: the position of each row's next token, which is the number
      of tokens the row has seen, kept or not.
    protected: by position, tokens that must still be kept while decoding.
    order: for each layer of the model, the stack that it is in; those of one
      stack lie there in the order of the model. -1 for a layer that keeps no
      keys and values.
    plan: the `kvjax.Plan` that it was made by, if that goes on evicting while
      decoding; else None.
  """

  stacks: tuple[Layer, ...]
  next_positions: Int[Array, " B"]
  protected: Bool[Array, "B P"] | None = None
  order: tuple[int, ...] = static(default=())
  plan: Any = static(default=None)

  @property
  def layers(self) -> tuple[Layer | None, ...]:
    """The cache of each layer, copied out of its stack."""
    return tuple(map(self.layer, range(len(self.order))))

  def layer(self, number: int) -> Layer | None:
    """The cache of one layer, copied out of its stack; None if it has none."""
    stack = self.order[number]
    if stack < 0:
      return None
    return self.stacks[stack].at(ranks(self.order)[number])

  @property
  def nbytes(self) -> int:
    """Bytes allocated."""
    return tree_bytes(self)

  @property
  def nbytes_by_memory(self) -> dict[str, int]:
    """The same for each kind of memory: "device" and "pinned_host"."""
    return nbytes_by_memory(self)

  def grown(self, capacities: Sequence[int | None]) -> "Cache":
    """The same tokens in stacks of at least so many slots per layer each.

    Args:
      capacities: one for each stack; None leaves it as it is.
    """
    stacks = tuple(
      stack
      if capacity is None
      or stack.capacity is None
      or capacity <= stack.capacity
      else shard_stack(stack.grown(capacity - stack.capacity))
      for stack, capacity in zip(self.stacks, capacities, strict=True)
    )
    return dataclasses.replace(self, stacks=stacks)

  @property
  def lengths(self) -> Int[Array, "L B K"]:
    """Tokens held per layer with a cache, row and KV head.

    Raises:
      InputError: layers have different numbers of KV heads; `cache.layer(i)`
        tells of one.
    """
    return self._by_layer(lambda stack: stack.lengths)

  @property
  def reads(self) -> Int[Array, "L B K"]:
    """Tokens that a token attends to, per layer, row and KV head.

    Of what is looked up, as many as the prompt's last token has found.
    """
    return self._by_layer(lambda stack: stack.reads)

  def _by_layer(self, count: Callable[[Layer], Array]) -> Int[Array, "L B K"]:
    counts = [count(stack) for stack in self.stacks]
    if len({own.shape[1:] for own in counts}) > 1:
      raise InputError(
        "Layers of this cache have different numbers of KV heads; count one "
        "at a time, as in cache.layer(0).lengths."
      )
    places = zip(self.order, ranks(self.order), strict=True)
    return jnp.stack([counts[s][i] for s, i in places if s >= 0])


def join_key(cache: Cache) -> Any:
  """What caches must have in common to be joined by `stack`; hashable."""

  def shape(leaf: Array, axis: int) -> Any:
    return leaf.shape[:axis], leaf.shape[axis + 1 :], jnp.dtype(leaf.dtype)

  rows = (cache.next_positions, cache.protected)
  return (
    tuple(shape(leaf, 1) for leaf in jax.tree.leaves(cache.stacks)),
    tuple(shape(leaf, 0) for leaf in jax.tree.leaves(rows)),
    jax.tree.structure(cache),
  )


def stack(caches: Sequence[Cache]) -> Cache:
  """Joins caches of equal sizes along the batch, to decode them together.

  Raises:
    InputError: there is none, or their layers differ in kind or size.
  """
  if not caches or any(join_key(c) != join_key(caches[0]) for c in caches):
    raise InputError(
      "Only caches whose layers have equal capacities, remember the same and "
      "go on by the same plan can be joined; give one or more such."
    )

  def join(*leaves: Array) -> Array:
    if leaves[0].ndim == 1:  # cursors: every row starts after the fullest
      return jnp.max(jnp.stack(leaves), axis=0)
    return jnp.concatenate(leaves, axis=1)

  def join_rows(*leaves: Array) -> Array:
    return jnp.concatenate(leaves, axis=0)

  first, *others = caches
  return dataclasses.replace(
    first,
    stacks=jax.tree.map(join, first.stacks, *(c.stacks for c in others)),
    next_positions=join_rows(*(c.next_positions for c in caches)),
    protected=jax.tree.map(
      join_rows, first.protected, *(c.protected for c in others)
    ),
  )
