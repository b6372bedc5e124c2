"""Saving and loading of compressed caches."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from kvjax import files, hosts
from kvjax.addresses import fetch, is_address, written
from kvjax.cache.cache import Cache
from kvjax.checkpoint.reading import read_arrays
from kvjax.checkpoint.trees import Arrays, describe, restore
from kvjax.engine.capacity import check_cache, check_caches
from kvjax.errors import InputError
from kvjax.model import Model, check_model

LAYOUT = 3
DESCRIPTION = "cache.json"
_ARRAYS = "arrays-"
_NAME = re.compile(f"{_ARRAYS}[0-9a-f]+")
_BLOCK = 2**20
# Bytes of the least that is stored apart.
_LEAST = 2**20
# What orbax raises if a disk is full, or another host has failed.
_UNWRITTEN = (OSError, ValueError, jax.errors.JaxRuntimeError)
# What a description raises whose fields are other than `save_cache` writes.
_UNLIKE = (
  AttributeError,
  KeyError,
  MemoryError,
  OSError,
  RecursionError,
  TypeError,
  ValueError,
)

Path = str | os.PathLike[str]


def save_cache(
  cache: Cache,
  directory: Path,
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
    with written(directory, overwrite=overwrite, stale=_ARRAYS) as place:
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
    "model": _identity(model, model_id),
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
    _remove(p for p in directory.glob(f"{_ARRAYS}*") if p.name != name)
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
  return f"{_ARRAYS}{uuid.uuid4().hex[:12]}"


def _make(directory: pathlib.Path) -> str:
  directory.mkdir(parents=True, exist_ok=True)
  return directory.name


def _describe(directory: pathlib.Path, description: dict[str, Any]) -> None:
  """Writes the description of the arrays that are in the directory."""
  description["files"] = _checksums(directory / description["arrays"])
  description["checksum"] = _checksum(description)
  text = json.dumps(description, indent=2)
  files.write_text(directory / DESCRIPTION, text + "\n")


def load_cache(directory: Path, *, model: Model, model_id: str) -> Cache:
  """Loads a cache that `save_cache` saved, bit for bit.

  With a mesh in context (`jax.set_mesh`), layers are sharded as by `prefill`,
  however they were sharded when they were saved, and each device gets only its
  part. In a program on several hosts, all of them must call it.

  Args:
    directory: directory of the cache, or its address, such as
      gs://bucket/cache.
    model: the model of the cache.
    model_id: the identifier given when it was saved.

  Raises:
    InputError: there is no such cache, it belongs to another model or has
      another layout, or it is damaged.

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
    >>> loaded.next_positions.tolist()
    [4, 2]
  """
  check_model(model)
  if is_address(directory):
    directory = fetch(directory)
  directory = pathlib.Path(directory).absolute()
  saved = _read_description(directory)
  if saved.get("layout") != LAYOUT:
    raise InputError(
      f"{directory} was saved in layout {saved.get('layout')!r:.40}; this "
      f"version of kvjax reads layout {LAYOUT}."
    )
  try:
    return _restored(directory, saved, _identity(model, model_id))
  except InputError:
    raise
  except _UNLIKE as error:
    raise _damaged(directory) from error


def _restored(
  directory: pathlib.Path, saved: dict[str, Any], identity: dict[str, Any]
) -> Cache:
  """Checks and loads what a description describes."""
  # It was computed before it was added.
  if saved.pop("checksum", None) != _checksum(saved):
    raise _damaged(directory)
  _check_identity(directory, saved, identity)
  # Another path could lead anywhere, and hold the files of a whole disk.
  if not _NAME.fullmatch(saved["arrays"]):
    raise _damaged(directory)
  # Orbax does not notice elements whose bits have changed.
  if _checksums(directory / saved["arrays"]) != saved["files"]:
    raise _damaged(directory)
  arrays = read_arrays(saved["cache"], directory / saved["arrays"])
  cache: Cache = restore(saved["cache"], arrays)
  return cache


def _damaged(directory: pathlib.Path) -> InputError:
  return InputError(
    f"The cache in {directory} is damaged or incomplete; save it again."
  )


def _identity(model: Model, model_id: str) -> dict[str, Any]:
  description = {"id": model_id, **dataclasses.asdict(model.geometry)}
  for layer in description["layers"]:
    # It says nothing about the cache.
    del layer["parallel"]
  # As it will be read: with lists for tuples.
  identity: dict[str, Any] = json.loads(json.dumps(description))
  return identity


def _check_identity(
  directory: pathlib.Path, saved: dict[str, Any], expected: dict[str, Any]
) -> None:
  """Refuses the cache of another model."""
  saved_sizes = _sizes(saved["model"])
  for name, expected_size in _sizes(expected).items():
    if saved_sizes.get(name) != expected_size:
      raise InputError(
        f"The cache in {directory} is of another model: its {name} is "
        f"{saved_sizes.get(name)!r:.80}, not {expected_size!r}."
      )


def _sizes(identity: dict[str, Any]) -> dict[str, Any]:
  """Properties that identify a model, with a name for each."""
  layers = identity["layers"]
  single = {name: x for name, x in identity.items() if name != "layers"}
  return {
    **single,
    "number of layers": len(layers),
    **{
      f"{name} of layer {number}": size
      for number, layer in enumerate(layers)
      for name, size in layer.items()
    },
  }


def _check_free(directory: pathlib.Path, overwrite: bool) -> None:
  """Refuses to replace files, except those of an interrupted save."""
  if not os.path.lexists(directory):
    return
  if not os.path.isdir(directory):
    raise InputError(f"{directory} is a file; give a directory.")
  names = {path.name for path in directory.iterdir()}
  names.discard(files.part_of(directory / DESCRIPTION).name)
  if any(n != DESCRIPTION and not n.startswith(_ARRAYS) for n in names):
    raise InputError(
      f"{directory} holds something other than a saved cache; give a new or "
      "an empty directory."
    )
  if DESCRIPTION in names and not overwrite:
    raise InputError(
      f"{directory} already holds a saved cache; overwrite=True replaces it."
    )


def _read_description(directory: pathlib.Path) -> dict[str, Any]:
  if not os.path.exists(directory):
    raise InputError(
      f"There is no {directory}; give a directory that save_cache has written."
    )
  if not (directory / DESCRIPTION).is_file():
    raise InputError(
      f"{directory} is no saved cache: it has no {DESCRIPTION}; give a "
      "directory that save_cache has written."
    )
  try:
    saved = files.parse_json(files.read_text(directory / DESCRIPTION))
  except ValueError as error:  # An InputError is one, too.
    raise _damaged(directory) from error
  if not isinstance(saved, dict):
    raise _damaged(directory)
  return saved


def _checksum(description: dict[str, Any]) -> int:
  return zlib.crc32(json.dumps(description).encode())


def _checksums(directory: pathlib.Path) -> dict[str, int]:
  """CRC-32 of every file in a directory and its subdirectories."""
  checksums = {}
  for path in sorted(p for p in directory.rglob("*") if p.is_file()):
    checksum = 0
    with path.open("rb") as file:
      while block := file.read(_BLOCK):
        checksum = zlib.crc32(block, checksum)
    checksums[path.relative_to(directory).as_posix()] = checksum
  return checksums


def _remove(paths: Iterable[pathlib.Path]) -> None:
  for path in list(paths):
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink()
