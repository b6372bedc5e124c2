"""Reading of a cache's arrays, each to where it belongs on the mesh."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Shaped

from kvjax import files
from kvjax.cache.sharding import layer_spec
from kvjax.checkpoint.trees import Arrays, abstract_arrays, restore
from kvjax.placement import HOST

Abstract = Mapping[str, jax.ShapeDtypeStruct]


def read_arrays(saved: Any, directory: pathlib.Path) -> Arrays:
  """Reads the arrays of a described cache that orbax has written.

  With a mesh in context, each device gets only its part of the layers' arrays,
  and a host has an array at a time.

  Args:
    saved: the description of the cache.
    directory: the folder of the arrays.
  """
  arrays = abstract_arrays(saved)
  places = _shardings(saved["fields"]["stacks"], arrays)
  # Orbax refuses arrays without elements, which the description restores.
  wanted = {
    path: _wanted(array, places.get(path))
    for path, array in arrays.items()
    if array.size
  }
  empty = {
    path: np.empty(array.shape, array.dtype)
    for path, array in arrays.items()
    if not array.size
  }
  found = empty | files.orbax().load(directory, wanted)
  return {path: jnp.asarray(found[path]) for path in arrays}


def _wanted(
  array: jax.ShapeDtypeStruct, place: NamedSharding | None
) -> Shaped[np.ndarray, "..."] | jax.ShapeDtypeStruct:
  """What orbax is asked for; it reads to the host what is an array of NumPy."""
  if place is None:
    return np.empty(array.shape, array.dtype)
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)


def _shardings(stacks: Any, arrays: Abstract) -> dict[str, NamedSharding]:
  """Says where the arrays of stacks of layers belong; empty without a mesh."""
  mesh = jax.sharding.get_mesh()
  places: dict[str, NamedSharding] = {}
  if mesh.empty:
    return places

  def place(arrays: Mapping[str, Shaped[jax.Array, "..."]]) -> None:
    names = {id(array): path for path, array in arrays.items()}

    def record(tree: Any, axes: Sequence[str]) -> Any:
      for leaf in jax.tree.leaves(tree):
        spec = layer_spec(leaf.shape, axes, leading=1)
        # What a stack makes of its arrays first is not read.
        if spec is not None and id(leaf) in names:
          places[names[id(leaf)]] = NamedSharding(mesh, spec)
      return tree

    for stack in restore(stacks, arrays):
      placed = stack.place(record)
      leaves = map(jax.tree.leaves, (placed, placed.offload()))
      for leaf, offloaded in zip(*leaves, strict=True):
        if offloaded is not leaf:
          path = names[id(leaf)]
          places[path] = places[path].with_memory_kind(HOST)

  jax.eval_shape(place, dict(arrays))
  return places
