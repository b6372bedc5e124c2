"""Reading and writing of decoder weights as a checkpoint of orbax.

The checkpoint is the tree of nested dictionaries that `flax.nnx.to_pure_dict`
makes of the weights, which orbax restores anywhere. Layers of a kind are
stacked in it as they are in memory.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx
from jaxtyping import PyTree

from kvjax import files, hosts
from kvjax.errors import InputError
from kvjax.models.tensor_files import CHECKPOINT
from kvjax.models.weights import is_finite

_SOURCE_DTYPES = ("float32", "float16", "bfloat16")


def write_checkpoint(params: nnx.State, directory: pathlib.Path) -> None:
  """Writes weights to the folder `CHECKPOINT` of a directory.

  Of a program on several hosts, all call it with the same directory. Each
  writes its devices' parts of weights that are spread over them; of weights
  that each host has for itself, the first host writes its own.

  Args:
    params: the decoder's state, sharded in any way; dtypes are kept.
    directory: an existing directory without that folder, which all hosts see.

  Raises:
    OSError: the checkpoint cannot be written.
  """
  if jax.process_count() > 1 and not hosts.spread(params):
    # Orbax takes arrays of a host's own devices from one host only in NumPy.
    params = jax.device_get(params)
  ocp = files.orbax()
  # All hosts must name the same path, and tempfile leaves out any "..".
  path = os.path.abspath(directory / CHECKPOINT)
  context = ocp.Context()
  # Devices with equal parts would share the writing, each by a program of its
  # own for every parameter, which takes minutes to compile.
  context.array.saving.use_replica_parallel = False
  try:
    with without_log(), context:
      ocp.save(path, nnx.to_pure_dict(params))
  # Of tensorstore, if a disk is full; of hosts that wait for one that failed.
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    raise OSError(files.reason(error)) from error


def read_checkpoint(
  directory: pathlib.Path,
  template: nnx.State,
  shardings: PyTree[jax.sharding.Sharding] | None = None,
) -> nnx.State:
  """Reads the weights that `write_checkpoint` has written to a directory.

  Names, shapes and dtypes are checked first. Parameters are then read one at a
  time, each to where it belongs, however it was sharded when it was saved.

  Args:
    directory: the directory.
    template: as for `kvjax.models.weights.read_weights`.
    shardings: as there; a process reads only the shards of its devices.

  Returns:
    A state like `template`, with arrays.

  Raises:
    InputError: the checkpoint cannot be read, a parameter is missing, of the
      wrong shape or dtype, or not known to the decoder, or it contains values
      that are not finite.
  """
  place = directory.absolute() / CHECKPOINT
  leaves, structure = jax.tree_util.tree_flatten_with_path(template)
  wanted = {_keys(path): leaf for path, leaf in leaves}
  _check(place, wanted)
  places = (
    [None] * len(wanted) if shardings is None else jax.tree.leaves(shardings)
  )
  arrays = [
    _read(place, keys, leaf, sharding)
    for (keys, leaf), sharding in zip(wanted.items(), places, strict=True)
  ]
  return jax.tree_util.tree_unflatten(structure, arrays)


@contextlib.contextmanager
def without_log() -> Iterator[None]:
  """Hides orbax's log of errors, which it raises as well."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)
  try:
    yield
  finally:
    logging.set_verbosity(before)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
  """Keys of a parameter in the checkpoint, by its path in the state."""
  return tuple(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))


def _check(
  place: pathlib.Path, wanted: Mapping[tuple[str, ...], jax.ShapeDtypeStruct]
) -> None:
  """Compares what is stored with what the decoder wants; reads no weights."""
  try:
    with without_log():
      tree = files.orbax().metadata(place).metadata
    if not isinstance(tree, dict):
      raise ValueError("orbax cannot read the description of the tree")
  except Exception as error:  # Orbax and tensorstore raise all kinds.
    raise InputError(
      f"{place} is no complete checkpoint of orbax; save the model again."
    ) from error
  stored = {
    _keys(path): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }
  for keys, leaf in wanted.items():
    name = ".".join(keys)
    if keys not in stored:
      raise InputError(f"The weights in {place} lack the parameter {name}.")
    shape = getattr(stored[keys], "shape", None)
    if shape != leaf.shape:
      raise InputError(
        f"The parameter {name} in {place} has shape {shape}; config.json asks "
        f"for {leaf.shape}."
      )
    dtype = str(stored[keys].dtype)
    if dtype not in _SOURCE_DTYPES:
      raise InputError(
        f"The parameter {name} in {place} is stored as {dtype}; only "
        f"{', '.join(_SOURCE_DTYPES)} are read."
      )
  unknown = stored.keys() - wanted.keys()
  if unknown:
    raise InputError(
      f"The weights in {place} hold the parameter {'.'.join(min(unknown))}, "
      "which the model of config.json does not have."
    )


def _read(
  place: pathlib.Path,
  keys: tuple[str, ...],
  leaf: jax.ShapeDtypeStruct,
  sharding: jax.sharding.Sharding | None,
) -> jax.Array:
  """Reads one parameter."""
  # Orbax reads to the host what is wanted as an array of NumPy.
  wanted: Any = np.empty(leaf.shape, leaf.dtype)
  if sharding is not None:
    wanted = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  for key in reversed(keys):
    wanted = {key: wanted}
  ocp = files.orbax()
  context = ocp.Context()
  context.pytree.loading.partial_load = True
  try:
    with without_log(), context:
      (found,) = jax.tree.leaves(ocp.load(place, wanted))
  except Exception as error:  # As above.
    raise InputError(
      f"The parameter {'.'.join(keys)} in {place} is damaged or incomplete; "
      "save the model again."
    ) from error
  array = jax.device_put(found, sharding)
  if not is_finite(array):
    raise InputError(
      f"The parameter {'.'.join(keys)} in {place} holds NaN or infinite "
      "values; save the model again."
    )
  return array
