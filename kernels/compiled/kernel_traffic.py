"""Counts the bytes that Pallas kernels move, from their block specs.

Data-dependent traffic (blocks chosen by data, or a kernel's own copies) is the
remainder of the kernel's cost estimate, if it has one.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Var, jaxprs_in_params


class KernelTraffic(NamedTuple):
  """Bytes that a kernel moves, if its arrays are in device memory.

  Attributes:
    name: name of the kernel.
    results: sizes of its results, which distinguish kernels of one name.
    read: bytes read of each operand.
    written: bytes written of each result.
  """

  name: str
  results: tuple[tuple[int, ...], ...]
  read: tuple[int, ...]
  written: tuple[int, ...]


def kernels_in(jaxpr: Any) -> Iterator[KernelTraffic]:
  """Yields all Pallas calls in a traced program, nested ones included."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "pallas_call":
      yield _traffic(equation)
    else:
      for part in jaxprs_in_params(equation.params):
        yield from kernels_in(part)


def _traffic(equation: Any) -> KernelTraffic:
  mapping, cost = (
    equation.params[name] for name in ("grid_mapping", "cost_estimate")
  )
  blocks = mapping.block_mappings
  moved = [_moved(block, mapping.grid) for block in blocks]
  # The grid sizes and the scalars that choose blocks come first.
  first = equation.invars[: len(equation.invars) - mapping.num_inputs]
  chosen_by = [_nbytes(x.aval) for x in first]
  decided = [
    i
    for i, block in enumerate(blocks)
    if _is_left_to_kernel(block) or _is_chosen(block, mapping.grid)
  ]
  most = sum(moved[i] for i in decided)
  if most and cost is not None:
    known = sum(moved) - most + sum(chosen_by)
    rest = max(cost.bytes_accessed - known, 0)
    for i in decided:
      moved[i] = rest * moved[i] // most
  return KernelTraffic(
    name=equation.params["name"],
    results=tuple(tuple(x.aval.shape) for x in equation.outvars),
    read=(*chosen_by, *moved[: mapping.num_inputs]),
    written=tuple(moved[mapping.num_inputs :]),
  )


def _is_left_to_kernel(block: Any) -> bool:
  """Returns whether the kernel copies parts of an array itself."""
  return str(block.transformed_block_aval.memory_space) in ("any", "hbm")


def _is_chosen(block: Any, grid: tuple[Any, ...]) -> bool:
  """Returns whether data choose the next block."""
  index_map = block.index_map_jaxpr
  chosen_by = set(index_map.invars[len(grid) :])
  return any(
    isinstance(x, Var) and x in chosen_by
    for equation in index_map.eqns
    for x in equation.invars
  )


def _moved(block: Any, grid: tuple[Any, ...]) -> int:
  """Counts the bytes of an operand or result that the pipeline moves.

  A block that stays the same in the next grid step is not moved again. A block
  chosen by data may change in every step. An array that the kernel copies
  itself counts once, as do all arrays if data determine the number of steps.
  """
  known = all(isinstance(size, int) for size in grid)
  if _is_left_to_kernel(block) or not known:
    return _nbytes(block.array_aval)
  inner = _nbytes(block.transformed_block_aval)
  if _is_chosen(block, grid):
    return math.prod(grid) * inner
  return _changes(block.index_map_jaxpr, grid) * inner


def _changes(index_map: Any, grid: tuple[int, ...]) -> int:
  """Counts the block changes over the grid, whose last axis is innermost.

  Args:
    index_map: maps a step, and scalars that choose other blocks, to a block.
    grid: steps along each axis.
  """
  steps = math.prod(grid)
  unused = [None] * (len(index_map.invars) - len(grid))

  def block(*step: jax.Array) -> list[Any]:
    indices = jax.core.eval_jaxpr(index_map, index_map.consts, *step, *unused)
    return list(indices)

  indices = np.indices(grid, np.int32).reshape(len(grid), steps)
  if not grid:
    return 1
  blocks = np.stack(jax.vmap(block)(*indices))
  return 1 + int(np.any(np.diff(blocks), axis=0).sum())


def _nbytes(x: Any) -> int:
  return math.prod(x.shape) * int(x.dtype.itemsize)
