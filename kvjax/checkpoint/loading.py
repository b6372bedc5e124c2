"""Loading of compressed caches."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from kvjax import files, hosts
from kvjax.addresses import fetch, is_address
from kvjax.cache.cache import Cache
from kvjax.checkpoint.description import (
  ARRAYS,
  DESCRIPTION,
  LAYOUT,
  checksum_of,
  checksums_in,
  identity_of,
)
from kvjax.checkpoint.reading import read_arrays
from kvjax.checkpoint.trees import restore
from kvjax.errors import InputError
from kvjax.model import Model, check_model

_NAME = re.compile(f"{ARRAYS}[0-9a-f]+")
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


def load_cache(directory: files.Path, *, model: Model, model_id: str) -> Cache:
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
  identity = identity_of(model, model_id)
  # Orbax reads on all hosts together, and would wait for one that cannot.
  local, saved = hosts.on_all(lambda: _checked(directory, identity))
  with _damage_refused(local):
    arrays = read_arrays(saved["cache"], local / saved["arrays"])
    cache: Cache = restore(saved["cache"], arrays)
  return cache


def _checked(
  directory: files.Path, identity: dict[str, Any]
) -> tuple[pathlib.Path, dict[str, Any]]:
  """Returns where a cache is, and its description, after checking its files."""
  if is_address(directory):
    directory = fetch(directory)
  local = pathlib.Path(directory).absolute()
  saved = _read_description(local)
  if saved.get("layout") != LAYOUT:
    raise InputError(
      f"{local} was saved in layout {saved.get('layout')!r:.40}; this "
      f"version of kvjax reads layout {LAYOUT}."
    )
  with _damage_refused(local):
    _check_description(local, saved, identity)
  return local, saved


def _check_description(
  directory: pathlib.Path, saved: dict[str, Any], identity: dict[str, Any]
) -> None:
  """Refuses a damaged cache, and one of another model."""
  # It was computed before it was added.
  if saved.pop("checksum", None) != checksum_of(saved):
    raise _damaged(directory)
  _check_identity(directory, saved, identity)
  # Another path could lead anywhere, and hold the files of a whole disk.
  if not _NAME.fullmatch(saved["arrays"]):
    raise _damaged(directory)
  # Orbax does not notice elements whose bits have changed.
  if checksums_in(directory / saved["arrays"]) != saved["files"]:
    raise _damaged(directory)


@contextlib.contextmanager
def _damage_refused(directory: pathlib.Path) -> Iterator[None]:
  """Refuses a cache that is not as `save_cache` writes it."""
  try:
    yield
  except InputError:
    raise
  except _UNLIKE as error:
    raise _damaged(directory) from error


def _damaged(directory: pathlib.Path) -> InputError:
  return InputError(
    f"The cache in {directory} is damaged or incomplete; save it again."
  )


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
