"""Several large prompts run through a layer row by row.

Each step has one row per device of `data`. What a layer needs besides its
results is that of one prompt then, however many there are, and the devices of
`model` share out its residual; see `kvjax.cache.sharding.residual_axes`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import ROWLESS, Activations
from kvjax.cache.sharding import context_size
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.mesh_axes import DATA

# By platform, the least residual of a prompt, in numbers, that fills a device
# alone: 1,024 tokens of width 4,096. Every step reads the weights of the layer,
# which takes less time than to compute as many tokens.
LARGE = {"tpu": 1024 * 4096}

# Maps the index of a layer's weights, hidden states, arrays that all layers
# share and positions to hidden states and activations, if any.
Run = Callable[[Any, Any, Any, Any], tuple[Any, Activations | None]]


def is_by_row(hidden: Float[Array, "B S E"]) -> bool:
  """Whether prompts run row by row, and not all together."""
  rows, tokens, width = hidden.shape
  if rows <= _data() or rows % _data() or context_size() > 1:
    return False
  return tokens * width >= LARGE.get(target_platform(), math.inf)


def map_rows(function: Callable[[Any], Any], rows: PyTree[Array]) -> PyTree:
  """Calls a function with one row per device of `data` at a time.

  Args:
    function: maps arrays whose leading axis is that of rows to others.
    rows: arrays [B, ...].
  """
  return _join(jax.lax.map(function, _split(rows)))


def by_row(run: Run) -> Run:
  """Makes a function that runs a layer row by row.

  Of the shared arrays, those [B, S, ...] are of rows.

  Args:
    run: runs the layer over any number of rows.
  """

  def run_all(
    index: Int[Array, ""],
    hidden: Float[Array, "B S E"],
    shared: PyTree,
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], Activations | None]:
    own, merge = _partition(shared, positions.shape)

    def one(hidden: Array, rows: tuple[Any, list[Array], Any]) -> Any:
      step, own, positions = rows
      given = jax.lax.dynamic_index_in_dim(hidden, step, keepdims=False)
      # XLA would copy the weights out of their stack before the first step.
      here, given = jax.lax.optimization_barrier((index, given))
      new, activations = run(here, given, merge(own), positions)
      if activations is not None:
        activations = _replace(activations, dict.fromkeys(ROWLESS))
      # XLA updates a carry of the loop in place.
      write = jax.lax.dynamic_update_index_in_dim
      return write(hidden, new.astype(hidden.dtype), step, 0), activations

    split, own, places = _split((hidden, own, positions))
    steps = jnp.arange(len(split), dtype=jnp.int32)
    new, activations = jax.lax.scan(one, split, (steps, own, places))
    new, activations = _join((new, activations))
    if activations is not None:
      # Of one step, of which XLA computes only what no row changes.
      first = merge([x[0] for x in own])
      _, again = run(index, split[0], first, places[0])
      assert again is not None
      kept = {name: getattr(again, name) for name in ROWLESS}
      activations = _replace(activations, kept)
    return new, activations

  return run_all


def _partition(
  shared: PyTree, shape: tuple[int, ...]
) -> tuple[list[Array], Callable[[list[Array]], PyTree]]:
  """Returns the arrays of rows, and what puts others of them in their places.

  Args:
    shared: arrays; those [B, S, ...] are of rows.
    shape: B and S.
  """
  leaves, structure = jax.tree.flatten(shared)
  of_rows = [leaf.shape[:2] == shape for leaf in leaves]

  def merge(own: list[Array]) -> PyTree:
    rest = iter(own)
    pairs = zip(leaves, of_rows, strict=True)
    merged = [next(rest) if is_of_rows else x for x, is_of_rows in pairs]
    return jax.tree.unflatten(structure, merged)

  return list(itertools.compress(leaves, of_rows)), merge


def _replace(activations: Activations, fields: dict[str, Any]) -> Activations:
  return dataclasses.replace(activations, **fields)


def _split(rows: PyTree[Array]) -> PyTree[Array]:
  """Splits arrays [B, ...] into steps, a new leading axis."""

  def split(x: Array) -> Array:
    # A device of `data` has consecutive rows, and takes one of them each time.
    return x.reshape(_data(), -1, *x.shape[1:]).swapaxes(0, 1)

  return jax.tree.map(split, rows)


def _join(steps: PyTree[Array]) -> PyTree[Array]:
  """Undoes `_split`."""

  def join(x: Array) -> Array:
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

  return jax.tree.map(join, steps)


def _data() -> int:
  """Number of devices that share out rows."""
  return int(jax.sharding.get_abstract_mesh().shape.get(DATA, 1))
