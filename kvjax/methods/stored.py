"""Arrays that methods read from files: statistics and filters of queries."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import safetensors
from jaxtyping import Float

from kvjax.addresses import local
from kvjax.errors import InputError
from kvjax.files import check_regular, reason
from kvjax.model import Geometry


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
  """The arrays of a file, by layer.

  Attributes:
    path: the file.
    arrays: float32 arrays by name, with a leading axis of L layers.
  """

  path: pathlib.Path
  arrays: Mapping[str, Float[np.ndarray, "L ..."]]

  @classmethod
  def read(cls, path: str, expected: Mapping[str, int]) -> "Stored":
    """Reads a file of safetensors; see `read_once`.

    Args:
      path: the file, or a folder with one named model.safetensors.
      expected: number of axes of every array, by name.

    Raises:
      InputError: see `read_once`, or the file lacks an array, or an array has
        other axes or numbers that are not finite.
    """
    return read_once(path, _read, tuple(sorted(expected.items())))

  def check(
    self, geometry: Geometry, name: str, *, per_query_head: bool
  ) -> None:
    """Refuses a model with other layers, heads or head sizes than an array.

    Args:
      geometry: sizes of the model.
      name: an array of [L, H, D] or [L, H, D, D].
      per_query_head: whether H counts query heads; if not, KV heads.

    Raises:
      InputError: they differ.
    """
    found = self.arrays[name].shape
    sizes = {
      (spec.heads if per_query_head else spec.kv_heads, spec.key_dim)
      for spec in geometry.layers
      if spec.compressible
    }
    dims = len(found) - 2
    fits = found[0] == geometry.num_layers and all(
      found[1:] == (heads, *(dim,) * dims) for heads, dim in sizes
    )
    if not fits:
      kind = "query heads" if per_query_head else "KV heads"
      of_model = " and ".join(
        f"{heads} {kind} of {dim}" for heads, dim in sorted(sizes)
      )
      raise InputError(
        f"{self.path} is of another model: its {name} is for {found[0]} layers "
        f"with {found[1]} {kind} of {found[-1]} numbers, and this model has "
        f"{geometry.num_layers} layers with {of_model}."
      )


def read_once[Read](
  path: str,
  read: Callable[..., Read],
  *arguments: Any,
  beside: tuple[str, ...] = (),
) -> Read:
  """Reads a file of arrays, once for as long as it does not change.

  Args:
    path: the file, or a folder with one named model.safetensors, or the
      address of one.
    read: reads the file, given its path and the arguments.
    *arguments: hashable values.
    beside: names of the other files of its folder that it reads.

  Raises:
    InputError: there is no such file.
  """
  file = local(path)
  # Of a name that is too long, `is_dir` would raise an error.
  file = file / "model.safetensors" if os.path.isdir(file) else file
  paths = (file, *map(file.with_name, beside))
  # Before it is read: what is written meanwhile is read the next time.
  stamps = tuple(map(_stamp, paths))
  absolute = os.path.abspath(file)
  key = (absolute, read, arguments)
  before, found = _READ.get(key, ((), None))
  if before != stamps:
    found = read(pathlib.Path(absolute), *arguments)
    _READ[key] = stamps, found
  result: Read = found
  return result


# By file and how it is read: its times and sizes, and what was read.
_READ: dict[Any, tuple[tuple[tuple[int, int], ...], Any]] = {}


def _stamp(file: pathlib.Path) -> tuple[int, int]:
  """Time and size of a file.

  Raises:
    InputError: there is none.
  """
  try:
    status = file.stat()
  except OSError as error:
    raise InputError(f"{file} cannot be read: {reason(error)}.") from error
  return status.st_mtime_ns, status.st_size


@contextlib.contextmanager
def open_tensors(file: pathlib.Path) -> Iterator[Any]:
  """Opens a file of safetensors.

  Raises:
    InputError: it is none.
  """
  try:
    check_regular(file)
    with safetensors.safe_open(file, framework="numpy") as opened:
      yield opened
  except (OSError, safetensors.SafetensorError, TypeError) as error:
    raise InputError(
      f"{file} is no file of safetensors: {reason(error)}."
    ) from error


def _read(file: pathlib.Path, expected: tuple[tuple[str, int], ...]) -> Stored:
  with open_tensors(file) as opened:
    present = {*opened.keys()}
    missing = [name for name, _ in expected if name not in present]
    if missing:
      raise InputError(
        f"{file} has no {' and '.join(missing)}; kvjax calibrate_queries "
        "writes such a file."
      )
    with np.errstate(over="ignore"):  # They are not finite then.
      arrays = {
        name: np.asarray(opened.get_tensor(name), np.float32)
        for name, _ in expected
      }
  for name, axes in expected:
    array = arrays[name]
    square = axes < 4 or array.shape[-2:] == array.shape[-1:] * 2
    if array.ndim != axes or not square or not np.isfinite(array).all():
      raise InputError(
        f"{name} of {file} must be finite numbers with {axes} axes, for "
        f"layers, heads and dimensions; it is {array.dtype} {array.shape}."
      )
  return Stored(file, arrays)
