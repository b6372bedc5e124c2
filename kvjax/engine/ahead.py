"""Compiles the programs of several calls at the same time, before the calls.

XLA compiles a program on a single thread. A sweep of many methods needs about
a hundred programs for its first layer, and would wait for one after another.
"""

import os
import sys
import weakref
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.hosts import is_traced

# Keys of the calls that each function was compiled for here.
_compiled: weakref.WeakKeyDictionary[Any, set[int]] = (
  weakref.WeakKeyDictionary()
)


# Each program that is compiled takes memory of its own.
_MOST_THREADS = 16


class Call(NamedTuple):
  """A call of a program that may not be compiled yet.

  Attributes:
    program: a function that `jax.jit` returned.
    arrays: its arguments that have arrays, by name.
    static: its static arguments, by name.
  """

  program: Any
  arrays: Mapping[str, Any]
  static: Mapping[str, Any]

  def __call__(self) -> Any:
    """Calls the program."""
    return self.program(**self.arrays, **self.static)

  def key(self) -> int:
    """A hash that calls of the function share if one program is for all."""
    leaves, structure = jax.tree.flatten(dict(self.arrays))
    shapes = tuple(map(_shape, leaves))
    mesh = jax.sharding.get_abstract_mesh()
    static = tuple(self.static.items())
    return hash((mesh, structure, shapes, static))


def _shape(leaf: Any) -> Hashable:
  """What a program depends on of an array."""
  sharding = leaf.sharding if getattr(leaf, "committed", False) else None
  return jnp.shape(leaf), jnp.result_type(leaf), sharding


def compile_together(calls: Iterable[Call]) -> None:
  """Compiles what calls need, as many programs at a time as there are cores.

  `jax.jit` finds the programs when they are called. Nothing happens within
  `jax.jit`, nor on several hosts, which compile in the same order.

  Args:
    calls: the calls; each is dropped before the next is asked for, so that
      their arrays need not be in memory together.
  """
  if jax.process_count() > 1 or is_traced(jnp.zeros(())):
    return
  futures: list[Future[Any]] = []
  with ThreadPoolExecutor(_threads()) as pool:
    try:
      for call in calls:
        key, known = call.key(), _compiled.setdefault(call.program, set())
        if key not in known:
          lowered = call.program.lower(**call.arrays, **call.static)
          futures.append(pool.submit(lowered.compile))
          known.add(key)
        del call
      for future in futures:
        future.result()
    finally:
      pool.shutdown(wait=False, cancel_futures=True)


def _threads() -> int:
  """Cores that this process may use, within a limit."""
  if sys.platform == "linux":
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)
  return min(os.cpu_count() or 1, _MOST_THREADS)
