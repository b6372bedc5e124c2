"""Long prompts run through a layer row by row.

Each step has one row per device of `data`. What a layer needs besides its
results is that of one prompt then, however many there are, and the devices of
`model` share out its residual; see `kvjax.cache.sharding.residual_axes`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Shaped

from kvjax.activations import ROWLESS, Activations
from kvjax.cache.sharding import context_size
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.mesh_axes import DATA
from kvjax.struct import replace

# By platform, the tokens of a prompt that keep a device busy alone. Every step
# reads the weights of the layer, all experts included, which takes less time
# than to compute as many tokens.
LONG = {"tpu": 4096}

# Maps the index of a layer's weights, hidden states, tokens and positions to
# hidden states and activations, if any.
Run = Callable[[Any, Any, Any, Any], tuple[Any, Activations | None]]


def runs_by_row(tokens: Int[Array, "B S"]) -> bool:
  """Whether prompts run row by row, and not together."""
  rows, length = tokens.shape
  long = length >= LONG.get(target_platform(), math.inf)
  return long and not rows % _data() and context_size() == 1


def map_rows(function: Callable[[Any], Any], rows: PyTree[Array]) -> PyTree:
  """Calls a function with one row per device of `data` at a time.

  Args:
    function: maps arrays whose leading axis is that of rows to others.
    rows: arrays [B, ...].
  """
  return _join(jax.lax.map(function, jax.tree.map(_split, rows)))


def by_row(run: Run) -> Run:
  """Makes a function that runs a layer row by row.

  Args:
    run: runs the layer over any number of rows.
  """

  def run_all(
    index: Int[Array, ""],
    hidden: Float[Array, "B S E"],
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], Activations | None]:
    # A gradient of a loop would take more memory.
    if len(hidden) == _data():
      return run(index, hidden, tokens, positions)

    def run_some(
      index: Array, given: Array, *rows: Array
    ) -> tuple[Any, Activations | None]:
      return run(index, given.astype(hidden.dtype), *rows)

    def step(state: Array, own: tuple[Array, Array, Array]) -> Any:
      number, *rows = own
      given = jax.lax.dynamic_index_in_dim(state, number, keepdims=False)
      # XLA would copy the weights out of their stack before the first step.
      here, given = jax.lax.optimization_barrier((index, given))
      new, activations = run_some(here, given, *rows)
      if activations is not None:
        activations = replace(activations, **dict.fromkeys(ROWLESS))
      # XLA updates a carry of the loop in place.
      write = jax.lax.dynamic_update_index_in_dim
      return write(state, new, number, 0), activations

    state, rows = _split(hidden), (_split(tokens), _split(positions))
    first = (index, state[0], *(x[0] for x in rows))
    new, activations = jax.eval_shape(run_some, *first)
    steps = jnp.arange(len(state), dtype=jnp.int32)
    state, by_step = jax.lax.scan(step, state.astype(new.dtype), (steps, *rows))
    joined = _join(by_step)
    if activations is not None and any(map(activations.has, ROWLESS)):
      # Of another first step, XLA computes only what no row changes.
      _, again = run_some(*first)
      rowless = {name: getattr(again, name) for name in ROWLESS}
      joined = replace(joined, **rowless)
    return _join(state), joined

  return run_all


def _split(x: Shaped[Array, "B *S"]) -> Shaped[Array, "C R *S"]:
  """Splits rows into C steps of R rows."""
  # A device of `data` has consecutive rows, and takes one of them each time.
  return x.reshape(_data(), -1, *x.shape[1:]).swapaxes(0, 1)


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
