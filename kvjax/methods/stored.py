"""Arrays that methods read from files: statistics and filters of queries."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Array, Float, Int

from kvjax.errors import InputError
from kvjax.files import check_regular, reason
from kvjax.model import Geometry


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
  """The arrays of a file, by layer.

  Attributes:
    path: the file.
    arrays: float32 arrays by name, with a leading axis of L layers.
    stamp: time and size of the file when it was read.
  """

  path: pathlib.Path
  arrays: Mapping[str, np.ndarray]
  stamp: tuple[int, int]

  @classmethod
  def read(cls, path: str, expected: Mapping[str, int]) -> "Stored":
    """Reads a file of safetensors once per process.

    Compiled programs contain the arrays and know a method by the name of its
    file alone, so that the file must stay as it is.

    Args:
      path: the file, or a folder with one named model.safetensors.
      expected: number of axes of every array, by name.

    Raises:
      InputError: there is no such file, it lacks an array, an array has other
        axes or numbers that are not finite, or it has changed since.
    """
    file = pathlib.Path(path)
    file = file / "model.safetensors" if file.is_dir() else file
    try:
      status = file.stat()
    except OSError as error:
      raise InputError(f"{file} cannot be read: {reason(error)}.") from error
    stored = _read(os.path.abspath(file), tuple(sorted(expected.items())))
    if stored.stamp != (status.st_mtime_ns, status.st_size):
      raise InputError(
        f"{file} has changed since it was read; write changed arrays to a file "
        "of another name."
      )
    return stored

  def layer(self, name: str, layer: Int[Array, ""]) -> Float[Array, "*D"]:
    """Returns an array of one layer."""
    return jnp.asarray(self.arrays[name])[layer]

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


@functools.cache
def _read(path: str, expected: tuple[tuple[str, int], ...]) -> Stored:
  file = pathlib.Path(path)
  try:
    check_regular(file)
    status = file.stat()
    with safetensors.safe_open(file, framework="numpy") as opened:
      present = {*opened.keys()}
      missing = [name for name, _ in expected if name not in present]
      if missing:
        raise InputError(
          f"{file} has no {' and '.join(missing)}; kvjax calibrate_queries "
          "writes such a file."
        )
      arrays = {
        name: np.asarray(opened.get_tensor(name), np.float32)
        for name, _ in expected
      }
  except (OSError, safetensors.SafetensorError, TypeError) as error:
    raise InputError(
      f"{file} is no file of safetensors: {reason(error)}."
    ) from error
  for name, axes in expected:
    array = arrays[name]
    square = axes < 4 or array.shape[-2:] == array.shape[-1:] * 2
    if array.ndim != axes or not square or not np.isfinite(array).all():
      raise InputError(
        f"{name} of {file} must be finite numbers with {axes} axes, for "
        f"layers, heads and dimensions; it is {array.dtype} {array.shape}."
      )
  return Stored(file, arrays, (status.st_mtime_ns, status.st_size))
