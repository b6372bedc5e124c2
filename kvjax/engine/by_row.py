"""Several long prompts run through a layer row by row.

Each step has one row per device of `data`. What a layer needs besides its
results is that of one prompt then, however many there are, and the devices of
`model` share out its residual; see `kvjax.cache.sharding.residual_axes`.
"""

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
from kvjax.model import Model
from kvjax.struct import replace

# By platform, the tokens of a prompt that keep a device busy alone. Every step
# reads the weights of the layer, all experts included, which takes less time
# than to compute as many tokens.
LONG = {"tpu": 4096}

# For each of the arrays that layers share, its axis of rows, None for none.
Axes = tuple[int | None, ...]
# Maps the index of a layer's weights, hidden states, arrays that all layers
# share and positions to hidden states and activations, if any.
Run = Callable[[Any, Any, Any, Any], tuple[Any, Activations | None]]


def row_axes(
  model: Model,
  params: PyTree,
  tokens: Int[Array, "B S"],
  positions: Int[Array, "B S"],
) -> Axes | None:
  """Finds the axes of rows if prompts run row by row; None if together.

  The axis of an array is the one that is shorter for fewer rows.
  """
  rows, length = tokens.shape
  long = length >= LONG.get(target_platform(), math.inf)
  if not long or rows <= _data() or rows % _data() or context_size() > 1:
    return None

  def shapes(rows: int) -> list[jax.ShapeDtypeStruct]:
    given = (
      jax.ShapeDtypeStruct((rows, length), x.dtype) for x in (tokens, positions)
    )
    return jax.tree.leaves(jax.eval_shape(model.embed, params, *given)[1])

  def axis_of(x: jax.ShapeDtypeStruct, y: jax.ShapeDtypeStruct) -> int | None:
    pairs = enumerate(zip(x.shape, y.shape, strict=True))
    return next((axis for axis, (a, b) in pairs if a != b), None)

  return tuple(map(axis_of, shapes(rows), shapes(_data())))


def map_rows(function: Callable[[Any], Any], rows: PyTree[Array]) -> PyTree:
  """Calls a function with one row per device of `data` at a time.

  Args:
    function: maps arrays whose leading axis is that of rows to others.
    rows: arrays [B, ...].
  """
  return _join(jax.lax.map(function, jax.tree.map(_split, rows)))


def by_row(run: Run, axes: Axes) -> Run:
  """Makes a function that runs a layer row by row.

  Args:
    run: runs the layer over any number of rows.
    axes: see `row_axes`.
  """

  def run_all(
    index: Int[Array, ""],
    hidden: Float[Array, "B S E"],
    shared: PyTree,
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], Activations | None]:
    leaves, structure = jax.tree.flatten(shared)
    pairs = list(zip(leaves, axes, strict=True))

    def run_some(
      index: Array, given: Array, own: list[Array], positions: Array
    ) -> tuple[Any, Activations | None]:
      rest = iter(own)
      some = [x if axis is None else next(rest) for x, axis in pairs]
      shared = jax.tree.unflatten(structure, some)
      return run(index, given.astype(hidden.dtype), shared, positions)

    def step(state: Array, rows: tuple[Any, list[Array], Any]) -> Any:
      number, own, positions = rows
      given = jax.lax.dynamic_index_in_dim(state, number, keepdims=False)
      # XLA would copy the weights out of their stack before the first step.
      here, given = jax.lax.optimization_barrier((index, given))
      new, activations = run_some(here, given, own, positions)
      if activations is not None:
        activations = replace(activations, **dict.fromkeys(ROWLESS))
      # XLA updates a carry of the loop in place.
      write = jax.lax.dynamic_update_index_in_dim
      return write(state, new, number, 0), activations

    own = [_split(x, axis) for x, axis in pairs if axis is not None]
    state, places = _split(hidden), _split(positions)
    first = (index, state[0], [x[0] for x in own], places[0])
    new, activations = jax.eval_shape(run_some, *first)
    steps = jnp.arange(len(state), dtype=jnp.int32)
    state, by_step = jax.lax.scan(
      step, state.astype(new.dtype), (steps, own, places)
    )
    joined = _join(by_step)
    if activations is not None and any(map(activations.has, ROWLESS)):
      # Of another first step, XLA computes only what no row changes.
      _, again = run_some(*first)
      rowless = {name: getattr(again, name) for name in ROWLESS}
      joined = replace(joined, **rowless)
    return _join(state), joined

  return run_all


def _split(x: Array, axis: int = 0) -> Array:
  """Splits the axis of rows, of which those of a step remain.

  The result has a new leading axis of steps.
  """
  # A device of `data` has consecutive rows, and takes one of them each time.
  shape = (*x.shape[:axis], _data(), -1, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def _join(steps: PyTree[Array]) -> PyTree[Array]:
  """Joins what steps return, [steps, rows of a step, ...], to [B, ...]."""

  def join(x: Array) -> Array:
    steps, rows, *rest = x.shape
    # Not -1: there may be no queries.
    return x.swapaxes(0, 1).reshape(steps * rows, *rest)

  return jax.tree.map(join, steps)


def _data() -> int:
  """Number of devices that share out rows."""
  return int(jax.sharding.get_abstract_mesh().shape.get(DATA, 1))
