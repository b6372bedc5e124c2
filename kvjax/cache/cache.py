"""The KV cache of a model: a plain pytree of layers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.cache.layers import Layer, tree_bytes
from kvjax.cache.placement import nbytes_by_memory
from kvjax.cache.sharding import shard_cache
from kvjax.engine.plans import Plan
from kvjax.errors import InputError
from kvjax.struct import static, struct


@struct
class Cache:
  """The cache of a whole model.

  Attributes:
    layers: one cache per layer; their capacities may differ.
    next_positions: the position of each row's next token, which is the number
      of tokens the row has seen, kept or not.
    protected: by position, tokens that must still be kept while decoding.
    plan: what it was made by, if that goes on evicting while decoding.
  """

  layers: tuple[Layer, ...]
  next_positions: Int[Array, " B"]
  protected: Bool[Array, "B P"] | None = None
  plan: Plan | None = static(default=None)

  @property
  def nbytes(self) -> int:
    """Bytes allocated."""
    return tree_bytes(self)

  @property
  def nbytes_by_memory(self) -> dict[str, int]:
    """The same for each kind of memory: "device" and "pinned_host"."""
    return nbytes_by_memory(self)

  def grown(self, capacities: Sequence[int]) -> "Cache":
    """The same tokens in layers of at least so many slots each."""
    layers = tuple(
      layer
      if capacity <= layer.capacity
      else shard_cache(layer.grown(capacity - layer.capacity))
      for layer, capacity in zip(self.layers, capacities, strict=True)
    )
    return dataclasses.replace(self, layers=layers)

  @property
  def lengths(self) -> Int[Array, "L B K"]:
    """Tokens held per layer, row and KV head."""
    return jnp.stack([layer.lengths for layer in self.layers])

  @property
  def reads(self) -> Int[Array, "L B K"]:
    """Tokens that a token attends to, per layer, row and KV head.

    Of what is looked up, as many as the prompt's last token has found.
    """
    return jnp.stack([layer.reads for layer in self.layers])


def concatenate(caches: Sequence[Cache]) -> Cache:
  """Joins caches of equal capacities along the batch.

  Raises:
    InputError: there is none, or their layers differ in kind or size.
  """
  shapes = [
    [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(cache)]
    for cache in caches
  ]
  structures: list[Any] = [jax.tree.structure(cache) for cache in caches]
  if not caches or any(
    shape != shapes[0] or structure != structures[0]
    for shape, structure in zip(shapes, structures, strict=True)
  ):
    raise InputError(
      "Only caches whose layers have equal capacities, remember the same and "
      "go on by the same plan can be joined; give one or more such."
    )

  def join(*leaves: Array) -> Array:
    if leaves[0].ndim == 0:  # cursors: every row starts after the fullest
      return jnp.max(jnp.stack(leaves))
    return jnp.concatenate(leaves, axis=0)

  return jax.tree.map(join, *caches)
