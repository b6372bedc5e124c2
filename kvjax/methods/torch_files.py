"""Reads tensors of PyTorch's files without PyTorch."""

import dataclasses
import io
import math
import pathlib
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from kvjax.errors import InputError
from kvjax.files import check_whole, reason

_DTYPES: Mapping[str, np.dtype[Any]] = {
  "FloatStorage": np.dtype(np.float32),
  "DoubleStorage": np.dtype(np.float64),
  "HalfStorage": np.dtype(np.float16),
  "BFloat16Storage": np.dtype(jnp.bfloat16),
}
_KEYS = (str, int)
# The pickle of a file lists tensors, whose numbers are beside it.
_MOST_PICKLE = 2**22
# The instructions of pickle's protocol 2, as torch.save writes them. All but
# those of `_Reader` make numbers, texts, tuples and lists.
_OPCODES = (
  *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.REDUCE),
  *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINUNICODE),
  *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
  *(pickle.BINFLOAT, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1),
  *(pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND),
  *(pickle.APPENDS, pickle.EMPTY_DICT, pickle.BINPERSID, pickle.BINPUT),
  *(pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)


def read_torch(path: pathlib.Path) -> Any:
  """Reads a file that torch.save has written, with tensors as NumPy arrays.

  Nothing of the file is executed, and its tensors take no more memory than the
  file. Lists, dictionaries, numbers and texts are themselves; objects other
  than tensors are left empty.

  Raises:
    InputError: it is no such file.
  """
  try:
    check_whole(path)
    with zipfile.ZipFile(path) as archive:
      (data,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
      _check_sizes(archive, data, path.stat().st_size)
      root = data.removesuffix("data.pkl")
      return _Reader(archive, root, archive.read(data)).load()
  except InputError:
    raise
  except Exception as error:
    # Whatever a damaged pickle leads to.
    raise InputError(
      f"{path} is no file that torch.save has written: {reason(error)}."
    ) from error


def stack_tensors(
  file: pathlib.Path, name: str, tensors: Sequence[Any], rank: int, each: str
) -> Float[np.ndarray, "n ..."]:
  """Joins what a file has in the places of tensors of one shape, in float32.

  Args:
    file: the file.
    name: name of the tensors, for messages.
    tensors: what the file has.
    rank: number of axes of each.
    each: what has one of them, such as "layer".

  Raises:
    InputError: some are no tensors of this rank, differ in shape, are empty or
      not finite, or all together are larger than the file.
  """
  arrays = [x for x in tensors if isinstance(x, np.ndarray) and x.ndim == rank]
  # A file may name one array many times.
  if sum(x.nbytes for x in arrays) > file.stat().st_size:
    raise InputError(f"{name} of {file} has more numbers than the file holds.")
  if len(arrays) == len(tensors) and len({x.shape for x in arrays}) == 1:
    stacked = np.stack(arrays).astype(np.float32)
    if stacked.size and np.isfinite(stacked).all():
      return stacked
  raise InputError(
    f"{name} of {file} must be finite numbers in arrays of rank {rank}, as "
    f"many in all {each}s."
  )


def _check_sizes(archive: zipfile.ZipFile, data: str, size: int) -> None:
  """Refuses what would take more memory than the file has bytes.

  Args:
    archive: the file.
    data: name of its pickle.
    size: its bytes.
  """
  entries = archive.infolist()
  if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
    raise ValueError("it is compressed")
  # Entries may overlap.
  if sum(entry.file_size for entry in entries) > size:
    raise ValueError("its entries are larger than the file")
  if archive.getinfo(data).file_size > _MOST_PICKLE:
    raise ValueError(f"{data} is larger than {_MOST_PICKLE:,} bytes")


class _Ignored:
  """Stands for an object of any other class."""

  def __init__(self, *arguments: Any, **named: Any) -> None:
    del arguments, named


@dataclasses.dataclass(frozen=True)
class _Kind:
  """Stands for a class of storages, by which pickles name their numbers."""

  dtype: np.dtype[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _Storage:
  """The numbers that tensors are parts of; no pickle can make one up."""

  numbers: Shaped[np.ndarray, " n"]


# The unpickler in C reserves memory for every number of an object up to the
# highest one that a file names.
class _Reader(pickle._Unpickler):
  """Unpickles lists, dictionaries and tensors; it calls nothing else."""

  def __init__(
    self, archive: zipfile.ZipFile, root: str, content: bytes
  ) -> None:
    super().__init__(io.BytesIO(content))
    self._archive, self._root = archive, root
    self._read: dict[str, bytes] = {}

  def find_class(self, module: str, name: str) -> Any:
    """Names what may be called."""
    if module == "torch" and name in _DTYPES:
      return _Kind(_DTYPES[name])
    return {
      ("torch._utils", "_rebuild_tensor_v2"): _tensor,
      ("torch._utils", "_rebuild_parameter"): _parameter,
      ("collections", "OrderedDict"): _dictionary,
    }.get((module, name), _Ignored)

  def persistent_load(self, pid: Any) -> Any:
    """Reads a storage."""
    _, kind, key, _, _ = pid
    if not isinstance(kind, _Kind):
      return _Ignored()
    if type(key) is not str:
      raise ValueError("a storage has no name")
    if key not in self._read:
      self._read[key] = self._archive.read(f"{self._root}data/{key}")
    return _Storage(np.frombuffer(self._read[key], kind.dtype))

  def _drop_state(self) -> None:
    """Leaves an object without its attributes; BUILD would set any."""
    self._stack.pop()

  def _ignore_object(self) -> None:
    """Makes no object of another class."""
    self._stack[-2:] = [_Ignored()]

  def _set_item(self) -> None:
    value = self._stack.pop()
    key = self._stack.pop()
    self._set([(key, value)])

  def _set_items(self) -> None:
    # Since the last MARK.
    items = self.pop_mark()  # type: ignore[attr-defined]
    self._set(list(zip(items[::2], items[1::2], strict=True)))

  def _set(self, items: list[tuple[Any, Any]]) -> None:
    target = self._stack[-1]
    # The hash of a tuple within many others overflows the stack.
    if type(target) is not dict or any(type(k) not in _KEYS for k, _ in items):
      raise ValueError("a dictionary has other keys than texts and numbers")
    target.update(items)

  def _refuse(self) -> None:
    raise ValueError("its pickle has an instruction that torch.save never uses")

  @property
  def _stack(self) -> list[Any]:
    return cast(list[Any], self.stack)  # type: ignore[attr-defined]

  dispatch: ClassVar[dict[int, Callable[[Any], None]]] = (
    dict.fromkeys(range(256), _refuse)
    | {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
    | {
      pickle.BUILD[0]: _drop_state,
      pickle.NEWOBJ[0]: _ignore_object,
      pickle.SETITEM[0]: _set_item,
      pickle.SETITEMS[0]: _set_items,
    }
  )


def _tensor(
  storage: Any, offset: Any, size: Any, stride: Any, *others: Any
) -> Shaped[np.ndarray, "..."] | _Ignored:
  """Makes an array of a part of a storage."""
  del others
  if not isinstance(storage, _Storage):
    return _Ignored()
  numbers = storage.numbers
  given = (offset, *size, *stride)
  tuples = type(size) is type(stride) is tuple and len(size) == len(stride)
  if not tuples or not all(type(n) is int and n >= 0 for n in given):
    raise ValueError("a tensor has no whole numbers as its sizes")
  count = math.prod(size)
  if not count:
    return np.zeros(size, numbers.dtype)
  last = offset + sum((n - 1) * by for n, by in zip(size, stride, strict=True))
  # Without strides of zero, the second follows from the first.
  if last >= numbers.size or count > numbers.size:
    raise ValueError("a tensor is larger than its storage")
  steps = tuple(by * numbers.itemsize for by in stride)
  return np.lib.stride_tricks.as_strided(
    numbers[offset:], size, steps, writeable=False
  )


def _parameter(tensor: Any, *others: Any) -> Any:
  """Makes the array of a parameter."""
  del others
  return tensor


def _dictionary() -> dict[Any, Any]:
  """Makes what the instructions that follow fill."""
  return {}
