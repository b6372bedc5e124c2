"""Saving of compressed caches."""

import contextlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from kvjax import files, hosts
from kvjax.addresses import is_address, written
from kvjax.cache.cache import Cache
from kvjax.checkpoint.description import (
  ARRAYS,
  DESCRIPTION,
  LAYOUT,
  checksum_of,
  checksums_in,
  identity_of,
)
from kvjax.checkpoint.trees import Arrays, describe
from kvjax.engine.capacity import check_cache, check_caches
from kvjax.errors import InputError
from kvjax.model import Model

# Bytes of the least that is stored apart.
_LEAST = 2**20
# What orbax raises if a disk is full, or another host has failed.
_UNWRITTEN = (OSError, ValueError, jax.errors.JaxRuntimeError)


def save_cache(
  cache: Cache,
  directory: files.Path,
  *,
  model: Model,
  model_id: str,
  made_by: str = "",
  overwrite: bool = False,
) -> None:
  """Saves a cache to a directory, atomically.

  The arrays are written to new files first; then `cache.json`, which names
  them, is replaced. An interrupted save leaves the previous cache, or nothing
  that `load_cache` accepts. If arrays are spread over several hosts, all of
  them must call it with a directory that they share, and each writes its parts.
  Other arrays are gathered on the host, and one process writes.

  Args:
    cache: the cache to save.
    directory: the directory, which is created if it does not exist, or an
      address of one host's program, such as gs://bucket/cache.
    model: the model of the cache.
    model_id: identifies the weights: a name or a digest.
    made_by: free-form description of how the cache was made.
    overwrite: whether to replace a cache that is saved there.

  Raises:
    InputError: the directory contains something else or cannot be written, the
      cache does not fit the model or has been donated, or it is on one of
      several hosts alone.

  Examples:
    >>> import tempfile
    >>> import kvjax
    >>> from kvjax.testing import TinyModel
    >>> model = TinyModel()
    >>> params = model.init()
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> plan = kvjax.get_plan("keydiff", kvjax.Tokens(3))
    >>> cache, logits = kvjax.prefill(model, params, prompts, plan)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = f"{folder}/cache"
    ...   kvjax.save_cache(cache, path, model=model, model_id="tiny")
    ...   loaded = kvjax.load_cache(path, model=model, model_id="tiny")
    >>> bool((loaded.lengths == cache.lengths).all())
    True
  """
  if is_address(directory):
    with written(directory, overwrite=overwrite, stale=ARRAYS) as place:
      return save_cache(
        cache, place, model=model, model_id=model_id, made_by=made_by
      )
  directory = pathlib.Path(directory).absolute()
  check_caches([cache])
  check_cache(model, cache)
  if jax.process_count() > 1 and not hosts.spread(cache):
    raise InputError(
      "Of a program on several hosts, only caches of a mesh of all their "
      "devices can be saved; save this one in a program on one host."
    )
  # Before arrays are copied to the host.
  name = _on_first(directory, lambda: _new_name(directory, overwrite))
  arrays: Arrays = {}
  description = {
    "layout": LAYOUT,
    "model": identity_of(model, model_id),
    "made_by": made_by,
    "arrays": name,
    "cache": describe(cache, "cache", arrays),
  }
  _on_first(directory, lambda: _make(directory))
  failure = None
  try:
    # Orbax refuses arrays without elements, which the description restores.
    filled = {path: array for path, array in arrays.items() if array.size}
    _write(directory / name, filled)
  except BaseException as error:
    failure = error

  def finish() -> str:
    # Here, as the other hosts wait for it.
    try:
      if failure is not None:
        raise failure
      _describe(directory, description)
    except BaseException:
      # With a star: orbax writes to a temporary folder beside it first.
      _remove(directory.glob(f"{name}*"))
      raise
    _remove(p for p in directory.glob(f"{ARRAYS}*") if p.name != name)
    return name

  _on_first(directory, finish)
  if failure is not None:  # On another host alone.
    with _said(directory):
      raise failure


def _write(folder: pathlib.Path, arrays: Arrays) -> None:
  """Writes large arrays such that devices read their rows and heads alone."""
  orbax = files.orbax()

  def stored(path: Any, array: Shaped[Array | np.ndarray, "..."]) -> Any:
    del path
    saving = orbax.options.ArrayOptions.Saving
    return saving.StorageOptions(shard_axes=_split(array.shape, array.nbytes))

  context = orbax.Context()
  context.array.saving.scoped_storage_options_creator = stored
  with context:
    orbax.save(folder, arrays)


def _split(shape: Sequence[int], nbytes: int) -> tuple[int, ...]:
  """Chooses the axes whose elements are stored apart: of rows, and of heads.

  Meshes share them out, and a device reads whole parts. Pages are too small to
  be stored apart: of packed layers, rows are.

  Args:
    shape: shape of an array of a stack of layers.
    nbytes: its size.
  """
  axes: list[int] = []
  for axis in range(1, min(3, len(shape))):
    nbytes //= shape[axis]
    if nbytes < _LEAST:
      break
    axes.append(axis)
  return tuple(axes)


def _on_first(directory: pathlib.Path, act: Callable[[], str]) -> str:
  """Calls a function that writes to a directory, on the first host."""
  with _said(directory):
    return hosts.from_first(act)


@contextlib.contextmanager
def _said(directory: pathlib.Path) -> Iterator[None]:
  """Makes one sentence of an error of writing."""
  try:
    yield
  except InputError:
    raise
  except _UNWRITTEN as error:
    raise InputError(
      f"The cache cannot be written to {directory}: {files.reason(error)}."
    ) from error


def _new_name(directory: pathlib.Path, overwrite: bool) -> str:
  """Makes a name for the arrays, if the cache may be written."""
  _check_free(directory, overwrite)
  return f"{ARRAYS}{uuid.uuid4().hex[:12]}"


def _make(directory: pathlib.Path) -> str:
  directory.mkdir(parents=True, exist_ok=True)
  return directory.name


def _describe(directory: pathlib.Path, description: dict[str, Any]) -> None:
  """Writes the description of the arrays that are in the directory."""
  description["files"] = checksums_in(directory / description["arrays"])
  description["checksum"] = checksum_of(description)
  text = json.dumps(description, indent=2)
  files.write_text(directory / DESCRIPTION, text + "\n")


def _check_free(directory: pathlib.Path, overwrite: bool) -> None:
  """Refuses to replace files, except those of an interrupted save."""
  if not os.path.lexists(directory):
    return
  if not os.path.isdir(directory):
    raise InputError(f"{directory} is a file; give a directory.")
  names = {path.name for path in directory.iterdir()}
  names.discard(files.part_of(directory / DESCRIPTION).name)
  if any(n != DESCRIPTION and not n.startswith(ARRAYS) for n in names):
    raise InputError(
      f"{directory} holds something other than a saved cache; give a new or "
      "an empty directory."
    )
  if DESCRIPTION in names and not overwrite:
    raise InputError(
      f"{directory} already holds a saved cache; overwrite=True replaces it."
    )


def _remove(paths: Iterable[pathlib.Path]) -> None:
  for path in list(paths):
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink()
