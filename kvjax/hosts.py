"""Meshes whose devices belong to several hosts, which run one program.

Every host calls the same functions with the same values, and has its part of
the arrays. What a host decides by must be whole on all of them.
"""

import os
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from kvjax.errors import InputError

# Bytes of the longest name of a file.
_NAME = 255
# Bytes of an error that other hosts quote.
_ERROR = 1000


class TracedError(InputError):
  """Values are needed of arrays that have none, as within `jax.jit`."""


def spanned() -> bool:
  """Whether the mesh in context (`jax.set_mesh`) has other hosts' devices."""
  mesh = jax.sharding.get_mesh()
  return not mesh.empty and mesh.is_multi_process


def spread(tree: PyTree) -> bool:
  """Whether arrays of a tree are on devices of several hosts."""
  return any(
    isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    for leaf in jax.tree.leaves(tree)
  )


def writes(tree: PyTree) -> bool:
  """Whether this host writes the arrays of a tree to files.

  Every host writes arrays of its own. Of arrays that are spread over the
  devices of several hosts, the first host does, once all have called `read`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from kvjax.hosts import writes
    >>> writes({"counts": jnp.ones(2)})
    True
  """
  return jax.process_index() == 0 or not spread(tree)


def is_traced(tree: PyTree) -> bool:
  """Whether arrays of a tree are without values, as within `jax.jit`."""
  leaves = jax.tree.leaves(tree)
  return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def read(tree: PyTree) -> Any:
  """Copies arrays to this host, as arrays of NumPy.

  Those that are spread over the devices of several hosts are gathered by a
  program of theirs, so that all of them must call this, in the same order.

  Raises:
    TracedError: arrays are traced, as within `jax.jit`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from kvjax.hosts import read
    >>> read({"counts": jnp.ones(2)})
    {'counts': array([1., 1.], dtype=float32)}
  """
  if is_traced(tree):
    raise TracedError(
      "kvjax needs the values of arrays here, which are unknown within "
      "jax.jit, and where a gradient is taken; call it outside of both, as it "
      "compiles programs of its own."
    )
  return jax.device_get(jax.tree.map(_whole, tree))


def from_first(act: Callable[[], str]) -> str:
  """Calls a function on the first host; returns its text on all hosts.

  All of them must call this, and wait for the first one.

  Args:
    act: returns a name of a file, which is not empty.

  Raises:
    OSError: on the other hosts, if the function raises an error on the first
      one, which raises that error.

  Examples:
    >>> from kvjax.hosts import from_first
    >>> from_first(lambda: "arrays")
    'arrays'
  """
  if jax.process_count() == 1:
    return act()
  name, failure = b"", None
  if jax.process_index() == 0:
    try:
      name = os.fsencode(act())
    except BaseException as error:
      failure = error
  padded = np.frombuffer(name.ljust(_NAME, b"\0"), np.uint8)
  received = np.asarray(multihost_utils.broadcast_one_to_all(padded))
  if failure is not None:
    raise failure
  name = received.tobytes().rstrip(b"\0")
  if not name:
    raise OSError("the first host cannot write there")
  return os.fsdecode(name)


def on_all[T](act: Callable[[], T]) -> T:
  """Calls a function on all hosts of the mesh in context, which then agree.

  No host goes on to a program of all of them unless the function has succeeded
  everywhere. Without such a mesh, a host is on its own.

  Args:
    act: what each host does by itself, such as reading a file.

  Raises:
    InputError: the function has failed on another host, whose error it quotes.
      That host raises the error itself.

  Examples:
    >>> from kvjax.hosts import on_all
    >>> on_all(lambda: 5)
    5
  """
  if not spanned():
    return act()
  result, failure, said = None, None, b""
  try:
    result = act()
  except BaseException as error:
    failure, said = error, (str(error) or type(error).__name__).encode()
  padded = np.frombuffer(said[:_ERROR].ljust(_ERROR, b"\0"), np.uint8)
  received = np.asarray(multihost_utils.process_allgather(padded))
  if failure is not None:
    raise failure
  # Programs print the errors of the first host alone, so it must tell others'.
  for host, row in enumerate(received):
    if quoted := row.tobytes().rstrip(b"\0").decode(errors="ignore"):
      raise InputError(f"On host {host}: {quoted}")
  return cast(T, result)


def _whole(leaf: Any) -> Any:
  if not isinstance(leaf, jax.Array) or (
    leaf.is_fully_addressable or leaf.is_fully_replicated
  ):
    return leaf
  assert isinstance(leaf.sharding, NamedSharding)
  return jax.device_put(
    leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec())
  )
