"""Reads tensors of PyTorch's files without PyTorch."""

import collections
import io
import math
import pathlib
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from kvjax.errors import InputError
from kvjax.files import check_whole, reason

_DTYPES: Mapping[str, np.dtype[Any]] = {
  "FloatStorage": np.dtype(np.float32),
  "DoubleStorage": np.dtype(np.float64),
  "HalfStorage": np.dtype(np.float16),
  "BFloat16Storage": np.dtype(jnp.bfloat16),
}


def read_torch(path: pathlib.Path) -> Any:
  """Reads a file that torch.save has written, with tensors as NumPy arrays.

  Nothing of the file is executed. Lists, dictionaries, numbers and texts are
  themselves; objects other than tensors are left empty.

  Raises:
    InputError: it is no such file.
  """
  try:
    check_whole(path)
    with zipfile.ZipFile(path) as archive:
      (data,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
      root = data.removesuffix("data.pkl")
      return _Reader(archive, root, archive.read(data)).load()
  except InputError:
    raise
  except Exception as error:
    # Whatever a damaged pickle leads to.
    raise InputError(
      f"{path} is no file that torch.save has written: {reason(error)}."
    ) from error


class _Ignored:
  """Stands for an object of any other class."""

  def __init__(self, *arguments: Any, **named: Any) -> None:
    del arguments, named

  def __setstate__(self, state: Any) -> None:
    del state


class _Storage(NamedTuple):
  """Stands for a class of storages; pickles name the storage's kind by it."""

  dtype: np.dtype[Any]


class _Reader(pickle.Unpickler):
  """Unpickles lists, dictionaries and tensors; it calls nothing else."""

  def __init__(
    self, archive: zipfile.ZipFile, root: str, content: bytes
  ) -> None:
    super().__init__(io.BytesIO(content))
    self._archive, self._root = archive, root

  def find_class(self, module: str, name: str) -> Any:
    """Names what may be called."""
    if module == "torch" and name in _DTYPES:
      return _Storage(_DTYPES[name])
    return {
      ("torch._utils", "_rebuild_tensor_v2"): _tensor,
      ("torch._utils", "_rebuild_parameter"): _parameter,
      ("collections", "OrderedDict"): collections.OrderedDict,
    }.get((module, name), _Ignored)

  def persistent_load(self, pid: Any) -> Any:
    """Reads a storage."""
    _, storage, key, _, _ = pid
    if not isinstance(storage, _Storage):
      return _Ignored()
    content = self._archive.read(f"{self._root}data/{key}")
    return np.frombuffer(content, storage.dtype)


def _tensor(
  storage: Any,
  offset: int,
  size: tuple[int, ...],
  stride: tuple[int, ...],
  *others: Any,
) -> Shaped[np.ndarray, "..."] | _Ignored:
  """Makes an array of a part of a storage."""
  del others
  if not isinstance(storage, np.ndarray):
    return _Ignored()
  if not math.prod(size):
    return np.zeros(size, storage.dtype)
  last = offset + sum((n - 1) * by for n, by in zip(size, stride, strict=True))
  if min(offset, *size, *stride) < 0 or last >= len(storage):
    raise ValueError("a tensor is larger than its storage")
  steps = tuple(by * storage.itemsize for by in stride)
  view = np.lib.stride_tricks.as_strided(storage[offset:], size, steps)
  return np.array(view)


def _parameter(tensor: Any, *others: Any) -> Any:
  """Makes the array of a parameter."""
  del others
  return tensor
