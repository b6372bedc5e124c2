"""Joins caches along the batch, to decode them together."""

import dataclasses
import functools
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache.base import Layer
from kvjax.cache.cache import Cache, check_not_donated
from kvjax.cache.sharding import shard_stack
from kvjax.errors import InputError
from kvjax.options.bounds import check_count, check_whole
from kvjax.placement import is_on_host


def _join_key(cache: Cache) -> Any:
  """A hashable key that is equal for caches of the same kinds and sizes."""

  def shape(leaf: Array | np.ndarray | jax.ShapeDtypeStruct, axis: int) -> Any:
    return leaf.shape[:axis], leaf.shape[axis + 1 :], jnp.dtype(leaf.dtype)

  rows = (cache.next_positions, cache.protected)
  return (
    # Equally many rows, too: `unstack` splits into equal parts.
    cache.next_positions.shape,
    tuple(shape(leaf, 1) for leaf in jax.tree.leaves(cache.stacks)),
    tuple(shape(leaf, 0) for leaf in jax.tree.leaves(rows)),
    # With the static fields: order, plan, and the retrieval methods.
    jax.tree.structure(cache),
  )


def group_caches(
  caches: Sequence[Cache], padding_nbytes: int = 0
) -> list[list[int]]:
  """Groups caches that decode well as one batch, and returns their indices.

  Caches of equal sizes share a group. With `padding_nbytes`, smaller ones whose
  layers are of the same kinds join the group of larger ones if `stack` has to
  add no more bytes of empty slots than that to the group. So do caches whose
  layers differ in size, such as a pyramid's, if those of the group share their
  stacks. The bytes of the weights are a good limit: every group reads them in
  each step of decoding, and has a program of its own.

  Args:
    caches: the caches.
    padding_nbytes: bytes of empty slots, on all devices, that `stack` may add
      to a group.

  Raises:
    InputError: `caches` is no list of caches, one has been donated, or
      `padding_nbytes` is no whole number of 0 or more.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4]])
    >>> budgets = kvjax.Tokens(3), kvjax.Tokens(2), kvjax.Tokens(3)
    >>> plans = [kvjax.get_plan("keydiff", budget) for budget in budgets]
    >>> caches, _ = kvjax.sweep(model, model.init(), prompts, plans)
    >>> kvjax.group_caches(caches)
    [[0, 2], [1]]
    >>> kvjax.group_caches(caches, padding_nbytes=1000)
    [[0, 1, 2]]
  """
  _check_sequence(caches)
  check_whole("padding_nbytes", padding_nbytes, 0)
  equal: dict[Any, list[int]] = {}
  for index, cache in enumerate(caches):
    equal.setdefault(_join_key(cache), []).append(index)
  if not padding_nbytes:
    return list(equal.values())
  groups: list[list[int]] = []
  added: list[int] = []
  # The largest first, so that those that may join it follow.
  for alike in sorted(equal.values(), key=lambda g: -caches[g[0]].nbytes):
    smaller = caches[alike[0]]
    for number, group in enumerate(groups):
      grown = _grown(smaller, caches[group[0]])
      if _join_key(grown) != _join_key(caches[group[0]]):
        continue
      padding = (grown.nbytes - smaller.nbytes) * len(alike)
      if added[number] + padding <= padding_nbytes:
        group += alike
        added[number] += padding
        break
    else:
      groups.append(list(alike))
      added.append(0)
  return sorted(map(sorted, groups))


def _check_sequence(caches: Any) -> None:
  """Refuses what is no sequence of caches, or has a donated one."""
  listed = isinstance(caches, Sequence)
  if not listed or not all(isinstance(cache, Cache) for cache in caches):
    raise InputError(
      "Caches are given as a list of kvjax.Cache, as in [cache, other], not as "
      f"{reprlib.repr(caches)}."
    )
  for cache in caches:
    check_not_donated(cache)


def _grown(cache: Cache, other: Cache) -> Cache:
  """The shapes of a cache that grew to the sizes of another one, if it can."""
  grown: Cache = jax.eval_shape(_grow_like, cache, other)
  return grown


def _grow_like(cache: Cache, other: Cache) -> Cache:
  """Grows stacks to the sizes of another cache, where these are larger.

  Args:
    cache: the cache.
    other: another cache, or its shapes.

  Returns:
    The cache, whose stacks are joined where their layers share one in `other`.
    It is as it was if layers are of other kinds, larger than those of the stack
    that they would join, or in one stack here and in several there.
  """
  if _without_cache(cache) != _without_cache(other):
    return cache
  stacks = []
  for layers, its in zip(_layers(other.order), other.stacks, strict=True):
    own = dict.fromkeys(cache.order[layer] for layer in layers)
    parts = {
      stack: layer.grown_like(its) if type(layer) is type(its) else layer
      for stack, layer in enumerate(cache.stacks)
      if stack in own
    }
    stored = [layer for stack in parts for layer in _layers(cache.order)[stack]]
    if sorted(stored) != layers or len(set(map(_kind, parts.values()))) != 1:
      return cache
    stacks.append(_join_layers(list(parts.values()), stored))
  return dataclasses.replace(
    cache, stacks=tuple(map(shard_stack, stacks)), order=other.order
  )


def _without_cache(cache: Cache) -> list[bool]:
  return [stack < 0 for stack in cache.order]


def _layers(order: Sequence[int]) -> list[list[int]]:
  """Returns the layers of each stack."""
  return [
    [layer for layer, stack in enumerate(order) if stack == number]
    for number in range(max(order, default=-1) + 1)
  ]


def _kind(stack: Layer) -> Any:
  """What stacks that can be joined have in common; pools cannot."""
  leaves = jax.tree.leaves(stack)
  shapes = tuple((leaf.shape[1:], jnp.dtype(leaf.dtype)) for leaf in leaves)
  own = None if stack.separable else id(stack)
  return type(stack), jax.tree.structure(stack), shapes, own


def _join_layers(stacks: Sequence[Layer], stored: Sequence[int]) -> Layer:
  """Joins stacks, which contain the given layers, in the order of the model."""
  if len(stacks) == 1:
    return stacks[0]
  places = np.argsort(stored)
  is_ordered = np.array_equal(places, np.arange(len(stored)))

  def join(*leaves: Array) -> Array:
    joined = jnp.concatenate(leaves)
    return joined if is_ordered else joined[places]

  joined: Layer = jax.tree.map(join, *stacks)
  return joined


def stack(caches: Sequence[Cache]) -> Cache:
  """Joins caches along the batch, to decode them together.

  Smaller caches grow to the sizes of the largest. Layers that share a stack in
  one cache must share one in the largest.

  Raises:
    InputError: there is none; one has been donated; they have different numbers
      of rows; their layers are of different kinds, are larger than a stack that
      they would join, or differ in what does not grow, such as heads, channels,
      and the keys that a retrieval method reads; or they evict by different
      plans while decoding.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, logits = kvjax.prefill(model, params, prompts, plan)
    >>> kvjax.stack([cache, cache]).next_positions.tolist()
    [4, 2, 4, 2]
  """
  return stack_with_room(caches, 0)


def stack_with_room(caches: Sequence[Cache], tokens: int) -> Cache:
  """Joins caches as `stack` does, with room for more tokens where it can.

  Slots that are made with the joined cache need no copy of it later.

  Args:
    caches: the caches; a single one is returned itself.
    tokens: slots per layer to add. Caches on several devices or on a host get
      none.

  Raises:
    InputError: see `stack`.
  """
  _check_sequence(caches)
  if not caches:
    raise InputError("There is no cache to join; give one or more.")
  if len(caches) == 1:
    return caches[0]
  largest = functools.reduce(_grown, caches)
  if not _all_fit(caches, largest):
    raise InputError(
      "Only caches of equally many rows, whose layers are of the same kinds "
      "and fit the stacks of the largest, and that evict by the same plan "
      "while decoding, can be joined; group them with kvjax.group_caches."
    )
  if any(map(_needs_one_program, caches)):
    return _concatenate(tuple(caches))
  if tokens:
    roomy = jax.eval_shape(lambda cache: cache.widen(tokens), largest)
    largest = roomy if _all_fit(caches, roomy) else largest
  leaves, structure = jax.tree.flatten(largest)
  shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
  joined = _zeros(shapes=shapes, structure=structure, count=len(caches))
  for place, cache in enumerate(caches):
    joined = _write(joined, cache, np.int32(place))
  return joined


def _all_fit(caches: Sequence[Cache], shapes: Cache) -> bool:
  """Whether all caches can grow to these shapes."""
  key = _join_key(shapes)
  return all(_join_key(_grown(cache, shapes)) == key for cache in caches)


def _needs_one_program(cache: Cache) -> bool:
  """Whether a cache is on several devices, on a host, or inside of a program.

  Its rows cannot be written in place by programs of their own then.
  """
  return any(
    isinstance(leaf, jax.core.Tracer | np.ndarray)
    or len(leaf.devices()) > 1
    or is_on_host(leaf)
    for leaf in jax.tree.leaves(cache.stacks)
  )


@jax.jit
def _concatenate(caches: tuple[Cache, ...]) -> Cache:
  """Joins caches, which grow to the largest, in one program."""

  def join(*leaves: Array) -> Array:
    if leaves[0].ndim == 1:  # cursors: all rows continue after the fullest
      return jnp.max(jnp.stack(leaves), axis=0)
    return jnp.concatenate(leaves, axis=1)

  largest = functools.reduce(_grown, caches)
  first, *rest = (_grow_like(cache, largest) for cache in caches)
  stacks = jax.tree.map(join, first.stacks, *(c.stacks for c in rest))
  rows = jax.tree.map(
    lambda *leaves: jnp.concatenate(leaves),
    _of_rows(first),
    *map(_of_rows, rest),
  )
  return _with_arrays(first, stacks, rows)


@functools.partial(jax.jit, static_argnames=("shapes", "structure", "count"))
def _zeros(*, shapes: Any, structure: Any, count: int) -> Cache:
  """Makes room for the rows of `count` caches of the same shapes.

  Args:
    shapes: shape and dtype of each array of a cache.
    structure: of the cache.
    count: the number of caches.
  """
  leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
  cache: Cache = jax.tree.unflatten(structure, leaves)

  def zeros(leaf: jax.ShapeDtypeStruct, axis: int) -> Array:
    sizes = list(leaf.shape)
    if len(sizes) > axis:
      sizes[axis] *= count
    return jnp.zeros(sizes, leaf.dtype)

  stacks = jax.tree.map(functools.partial(zeros, axis=1), cache.stacks)
  rows = jax.tree.map(functools.partial(zeros, axis=0), _of_rows(cache))
  return _with_arrays(cache, stacks, rows)


# A program for each size of the caches that are joined. One for all of them
# would take a second of compilation per dozen, and CPUs would copy what grew.
@functools.partial(jax.jit, donate_argnames="joined")
def _write(joined: Cache, cache: Cache, place: Int[Array, ""]) -> Cache:
  """Writes the rows of a cache, which grows, to their place in a joined one."""

  def write(into: Array, leaf: Array, axis: int) -> Array:
    if leaf.ndim <= axis:  # cursors: all rows continue after the fullest
      return jnp.maximum(into, leaf)
    start = place * leaf.shape[axis]
    return jax.lax.dynamic_update_slice_in_dim(into, leaf, start, axis)

  cache = _grow_like(cache, joined)
  stacks = jax.tree.map(
    functools.partial(write, axis=1), joined.stacks, cache.stacks
  )
  rows = jax.tree.map(
    functools.partial(write, axis=0), _of_rows(joined), _of_rows(cache)
  )
  return _with_arrays(joined, stacks, rows)


def _of_rows(cache: Cache) -> tuple[Any, Any]:
  """The arrays whose first axis is the batch."""
  return cache.next_positions, cache.protected


def _with_arrays(cache: Cache, stacks: Any, rows: tuple[Any, Any]) -> Cache:
  """Replaces all arrays of a cache."""
  positions, protected = rows
  return dataclasses.replace(
    cache, stacks=stacks, next_positions=positions, protected=protected
  )


def unstack(cache: Cache, count: int) -> tuple[Cache, ...]:
  """Splits a cache into `count` caches of equally many rows; undoes `stack`.

  Those that grew to be stacked stay as large as the others, and layers whose
  stacks were joined share one.

  Each is a copy. All continue at the slot after the fullest row, so that those
  with shorter rows have less room left than alone.

  Raises:
    InputError: the rows cannot be divided so, or the cache has been donated.

  Examples:
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, logits = kvjax.prefill(model, params, prompts, plan)
    >>> [one.next_positions.tolist() for one in kvjax.unstack(cache, 2)]
    [[4], [2]]
  """
  _check_sequence([cache])
  rows = cache.next_positions.shape[0]
  check_count("The number of caches", count)
  if rows % count:
    raise InputError(
      f"{rows} rows cannot be divided into {count} caches of equally many."
    )

  def part(number: int) -> Cache:
    own = slice(number * rows // count, (number + 1) * rows // count)

    # Each cache may be donated, so they must not share arrays: cursors, and
    # all leaves if there is one part, as a slice of everything is no copy.
    def split(leaf: Array) -> Array:
      return jnp.copy(leaf if leaf.ndim == 1 else leaf[:, own])

    def split_rows(leaf: Array) -> Array:
      return jnp.copy(leaf[own])

    return dataclasses.replace(
      cache,
      # A slice of sharded rows is on every device; spread it again.
      stacks=tuple(
        shard_stack(jax.tree.map(split, stack)) for stack in cache.stacks
      ),
      next_positions=split_rows(cache.next_positions),
      protected=jax.tree.map(split_rows, cache.protected),
    )

  return tuple(map(part, range(count)))
