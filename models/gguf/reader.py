"""Reader of GGUF files: metadata and memory-mapped tensors.

The gguf library defines the formats and dequantizes. The header is parsed here,
because the library's reader takes seconds for a large vocabulary and does not
detect truncated files.
"""

import dataclasses
import functools
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import gguf
import numpy as np

from kvjax.errors import InputError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
# Format characters of metadata numbers, for numpy and struct, by type code.
_NUMBERS: Mapping[int, str] = {
  gguf.GGUFValueType.UINT8: "<B",
  gguf.GGUFValueType.INT8: "<b",
  gguf.GGUFValueType.UINT16: "<H",
  gguf.GGUFValueType.INT16: "<h",
  gguf.GGUFValueType.UINT32: "<I",
  gguf.GGUFValueType.INT32: "<i",
  gguf.GGUFValueType.FLOAT32: "<f",
  gguf.GGUFValueType.UINT64: "<Q",
  gguf.GGUFValueType.INT64: "<q",
  gguf.GGUFValueType.FLOAT64: "<d",
  gguf.GGUFValueType.BOOL: "<?",
}
_U32, _U64 = "<I", "<Q"


class StoredTensor(NamedTuple):
  """A tensor in the format of the file.

  Attributes:
    kind: quantization format.
    shape: shape in numpy's order, rows first.
    data: bytes of each row along the last axis, uint8.
  """

  kind: gguf.GGMLQuantizationType
  shape: tuple[int, ...]
  data: np.ndarray


@dataclasses.dataclass(frozen=True)
class GgufFile:
  """An open GGUF file.

  Attributes:
    path: path of the file.
    fields: the metadata; arrays are lists.
    tensors: tensors by their names in the file.
  """

  path: pathlib.Path
  fields: Mapping[str, Any]
  tensors: Mapping[str, StoredTensor]

  @classmethod
  def open(cls, path: pathlib.Path) -> "GgufFile":
    """Reads the header and memory-maps the rest.

    Raises:
      InputError: the file cannot be read, is not GGUF, is not complete, or
        contains tensors in a format that cannot be dequantized.
    """
    try:
      with path.open("rb") as file:
        start = file.read(len(_MAGIC))
        if start != _MAGIC:
          raise InputError(f"{path} is not a GGUF file.")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
      raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    header = _Header(path, content)
    tensor_count, field_count = header.counts()
    fields: dict[str, Any] = {}
    for _ in range(field_count):
      key = header.text()
      if key in fields:
        raise header.broken(f"the field {key!r} is there twice")
      fields[key] = header.value()
    entries = [header.tensor() for _ in range(tensor_count)]
    alignment = fields.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
      raise header.broken(f"its {_ALIGNMENT} is {alignment!r}")
    # Tensors begin at the next multiple of the alignment after the header, and
    # their offsets count from there.
    begin = -(-header.place // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
      if entry.name in tensors:
        raise header.broken(f"the tensor {entry.name} is there twice")
      tensors[entry.name] = header.stored(entry, begin)
    return cls(path, fields, tensors)


@functools.cache
def can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
  """Whether the gguf library can dequantize this format."""
  _, size = gguf.GGML_QUANT_SIZES[kind]
  try:
    # The library has no list of them; a block of zeros shows it.
    gguf.dequantize(np.zeros((1, size), np.uint8), kind)
  except NotImplementedError:
    return False
  return True


class _Entry(NamedTuple):
  """Description of a tensor in the header."""

  name: str
  shape: tuple[int, ...]
  kind: int
  offset: int


class _Header:
  """Sequential reader of the header, which never reads past the end."""

  def __init__(self, path: pathlib.Path, content: mmap.mmap) -> None:
    self._path = path
    self._content = content
    self.place = len(_MAGIC)

  def counts(self) -> tuple[int, int]:
    """Reads the version, and the number of tensors and of fields."""
    version = self._number(_U32)
    if version not in _VERSIONS:
      # A small number in the other byte order has its low bytes zero.
      swapped = version & 0xFFFF == 0
      what = "big-endian" if swapped else f"version {version}"
      raise InputError(
        f"{self._path} is a {what} GGUF file; only little-endian files of "
        f"versions {' and '.join(map(str, _VERSIONS))} are read."
      )
    return self._number(_U64), self._number(_U64)

  def text(self) -> str:
    """Reads a string: its length in bytes, then UTF-8."""
    size = self._number(_U64)
    begin = self._take(size)
    try:
      return self._content[begin : begin + size].decode()
    except UnicodeDecodeError as error:
      raise self.broken("it has text that is not UTF-8") from error

  def value(self) -> Any:
    """Reads a type code and a value of that type."""
    kind = self._number(_U32)
    if kind in _NUMBERS:
      return self._number(_NUMBERS[kind])
    if kind == gguf.GGUFValueType.STRING:
      return self.text()
    if kind == gguf.GGUFValueType.ARRAY:
      return self._array()
    raise self.broken(f"it has metadata of the unknown type {kind}")

  def tensor(self) -> _Entry:
    """Reads the description of the next tensor."""
    name = self.text()
    dimensions = self._number(_U32)
    if dimensions > _MAX_DIMENSIONS:
      raise self.broken(f"the tensor {name} has {dimensions} dimensions")
    shape = [self._number(_U64) for _ in range(dimensions)]
    if not shape or not all(shape):
      raise self.broken(f"the tensor {name} is empty")
    kind, offset = self._number(_U32), self._number(_U64)
    # GGUF lists the fastest axis first.
    return _Entry(name, tuple(shape[::-1]), kind, offset)

  def stored(self, entry: _Entry, begin: int) -> StoredTensor:
    """Returns the tensor of an entry.

    Args:
      entry: description of the tensor.
      begin: offset of the first tensor, in bytes.
    """
    kind = self._format(entry)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    width = entry.shape[-1]
    if width % block:
      raise self.broken(
        f"the tensor {entry.name} has rows of {width} numbers, which blocks of "
        f"{block} do not fill"
      )
    # Bytes of a row, which blocks of `block` numbers and `size` bytes fill.
    rows = (*entry.shape[:-1], width // block * size)
    count = math.prod(rows)
    begin += entry.offset
    if begin + count > len(self._content):
      raise self._truncated(f"the tensor {entry.name}")
    data = np.frombuffer(self._content, np.uint8, count, begin)
    return StoredTensor(kind, entry.shape, data.reshape(rows))

  def broken(self, what: str) -> InputError:
    """Makes the error for invalid contents."""
    return InputError(
      f"{self._path} is not a whole GGUF file, as {what}; fetch it again."
    )

  def _format(self, entry: _Entry) -> gguf.GGMLQuantizationType:
    known = {int(kind): kind for kind in gguf.GGMLQuantizationType}
    kind = known.get(entry.kind)
    if kind is None or not can_dequantize(kind):
      name = f"format {entry.kind}" if kind is None else kind.name
      names = [kind.name for kind in known.values() if can_dequantize(kind)]
      raise InputError(
        f"The tensor {entry.name} in {self._path} is stored as {name}; only "
        f"{', '.join(names)} are read."
      )
    return kind

  def _array(self) -> list[Any]:
    kind = self._number(_U32)
    count = self._number(_U64)
    if kind in _NUMBERS:
      form = np.dtype(_NUMBERS[kind])
      begin = self._take(count * form.itemsize)
      return np.frombuffer(self._content, form, count, begin).tolist()
    if kind == gguf.GGUFValueType.STRING:
      return self._texts(count)
    raise self.broken(f"it has an array of the unknown type {kind}")

  def _texts(self, count: int) -> list[str]:
    # A string takes at least eight bytes; a wrong count must not allocate.
    if count * 8 > len(self._content) - self.place:
      raise self._truncated("its metadata")
    return [self.text() for _ in range(count)]

  def _number(self, form: str) -> Any:
    begin = self._take(struct.calcsize(form))
    return struct.unpack_from(form, self._content, begin)[0]

  def _take(self, size: int) -> int:
    """Skips `size` bytes; returns where they begin."""
    begin = self.place
    if begin + size > len(self._content):
      raise self._truncated("its metadata")
    self.place += size
    return begin

  def _truncated(self, what: str) -> InputError:
    return InputError(
      f"{self._path} is not complete: it ends before {what} does; fetch it "
      "again."
    )
