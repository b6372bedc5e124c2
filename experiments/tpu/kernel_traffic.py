"""Bytes that Pallas kernels move, counted from how they cut up their arrays.

What data decide, which blocks follow one another or what a kernel copies by
itself, is what its cost estimate leaves for it, where it has one.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Var, jaxprs_in_params


class KernelTraffic(NamedTuple):
  """Bytes that a kernel moves, if its arrays are in the device's memory.

  Attributes:
    name: of the kernel.
    results: sizes of the arrays that it computes; they tell kernels of one
      name apart.
    read: for each operand.
    written: for each result.
  """

  name: str
  results: tuple[tuple[int, ...], ...]
  read: tuple[int, ...]
  written: tuple[int, ...]


def kernels_in(jaxpr: Any) -> Iterator[KernelTraffic]:
  """Every Pallas call in a traced program, in any part of it."""
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
  # Sizes of the grid and what blocks are chosen by come first.
  first = equation.invars[: len(equation.invars) - mapping.num_inputs]
  chosen_by = [_nbytes(x.aval) for x in first]
  decided = [
    i
    for i, block in enumerate(blocks)
    if _is_left_to_kernel(block) or _is_chosen(block, mapping.grid)
  ]
  most = sum(moved[i] for i in decided)
  if most and cost is not None:
    others = sum(moved) - most + sum(chosen_by)
    rest = max(cost.bytes_accessed - others, 0)
    for i in decided:
      moved[i] = rest * moved[i] // most
  return KernelTraffic(
    name=equation.params["name"],
    results=tuple(tuple(x.aval.shape) for x in equation.outvars),
    read=(*chosen_by, *moved[: mapping.num_inputs]),
    written=tuple(moved[mapping.num_inputs :]),
  )


def _is_left_to_kernel(block: Any) -> bool:
  """Whether the kernel itself copies what it needs of an array."""
  return str(block.transformed_block_aval.memory_space) in ("any", "hbm")


def _is_chosen(block: Any, grid: tuple[Any, ...]) -> bool:
  """Whether data say which block is next."""
  index_map = block.index_map_jaxpr
  chosen_by = set(index_map.invars[len(grid) :])
  return any(
    isinstance(x, Var) and x in chosen_by
    for equation in index_map.eqns
    for x in equation.invars
  )


def _moved(block: Any, grid: tuple[Any, ...]) -> int:
  """Bytes of an operand or a result that a kernel's pipeline moves.

  A block that stays the same from one step of the grid to the next is not moved
  again; one that is chosen by data may be another at every step. An array that
  is left to the kernel counts once, and so does every one where data say how
  many steps there are.
  """
  known = all(isinstance(size, int) for size in grid)
  if _is_left_to_kernel(block) or not known:
    return _nbytes(block.array_aval)
  inner = _nbytes(block.transformed_block_aval)
  if _is_chosen(block, grid):
    return math.prod(grid) * inner
  return _changes(block.index_map_jaxpr, grid) * inner


def _changes(index_map: Any, grid: tuple[int, ...]) -> int:
  """How many blocks follow one another as the grid is walked, last axis first.

  Args:
    index_map: the block of a step; takes the step, and what others are chosen
      by.
    grid: steps along each axis.
  """
  steps = math.prod(grid)
  unused = [None] * (len(index_map.invars) - len(grid))

  def block(*step: jax.Array) -> list[Any]:
    found = jax.core.eval_jaxpr(index_map, index_map.consts, *step, *unused)
    return list(found)

  indices = np.indices(grid, np.int32).reshape(len(grid), steps)
  if not grid:
    return 1
  blocks = np.stack(jax.vmap(block)(*indices))
  return 1 + int(np.any(np.diff(blocks), axis=0).sum())


def _nbytes(x: Any) -> int:
  return math.prod(x.shape) * int(x.dtype.itemsize)
