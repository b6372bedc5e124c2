"""Decoder weights in Hugging Face's safetensors files.

A parameter's path in the decoder is its name in the file, with four exceptions.
All names but that of the output matrix begin with `model.`. The last part is
always `weight` or `bias`. Matrices are stored transposed ([out, in]). A
parameter with an axis of layers is stored as one tensor per layer, under
`model.layers.0` and so on.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jaxtyping import PyTree

from kvjax import files
from kvjax.errors import InputError
from kvjax.models.json_files import read_json, write_json

# Of a name in a message.
_LONGEST = 100
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SOURCE_DTYPES = ("F32", "F16", "BF16")
_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Tensors:
  """Tensors that a decoder's weights are read from.

  Attributes:
    files: the file of each tensor, by Hugging Face's names of tensors; an
      object with `get_slice` and `get_tensor`, as in safetensors.
    place: path of the file or directory, for messages.
    described_by: what determines the expected shapes, for messages.
    original_name: maps a tensor's name to its name in the file.
  """

  files: Mapping[str, Any]
  place: pathlib.Path
  described_by: str = "config.json"
  original_name: Callable[[str], str] = str


def open_tensors(directory: pathlib.Path) -> Tensors:
  """Opens the tensors of a Hugging Face directory.

  Args:
    directory: a directory with model.safetensors, or with several files and
      their index.

  Raises:
    InputError: a file is missing or broken.
  """
  return Tensors(_open(directory), directory)


def read_weights(
  tensors: Tensors,
  template: nnx.State,
  shardings: PyTree[jax.sharding.Sharding] | None = None,
) -> nnx.State:
  """Reads the weights of a decoder.

  Names, shapes and dtypes are checked first. Parameters are then read one at a
  time, so that at most one parameter, of all layers, is in host memory. With
  shardings, a process reads only the shards of its devices.

  Args:
    tensors: the tensors to read.
    template: the decoder's state with `jax.ShapeDtypeStruct` leaves, as
      `nnx.eval_shape` returns it; its dtypes are those of the result.
    shardings: a tree like `template` with each parameter's sharding; by default
      all parameters are on the default device.

  Returns:
    A state like `template`, with arrays.

  Raises:
    InputError: a tensor is missing, of the wrong shape or dtype, not known to
      the decoder, or contains values that are not finite.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(template)
  wanted = [_tensors(path, leaf) for path, leaf in leaves]
  _check(tensors, [tensor for each in wanted for tensor in each])
  places = (
    [None] * len(wanted) if shardings is None else jax.tree.leaves(shardings)
  )
  arrays = [
    _read(tensors.files, parts, leaf.shape, place)
    for parts, (_, leaf), place in zip(wanted, leaves, places, strict=True)
  ]
  for array, parts in zip(arrays, wanted, strict=True):
    _check_finite(tensors, array, parts)
  return jax.tree_util.tree_unflatten(structure, arrays)


def write_weights(
  params: nnx.State,
  directory: pathlib.Path,
  max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes weights in the format that `read_weights` reads.

  Args:
    params: the decoder's state; dtypes are kept.
    directory: an existing directory.
    max_shard_bytes: larger weights are written as several files and an index;
      a single tensor is never split.
  """
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  parts = [
    _Part(tensor, leaf)
    for path, leaf in leaves
    for tensor in _tensors(path, leaf)
  ]
  # Sorted by layer, so that a layer is in as few files as possible.
  parts.sort(
    key=lambda part: -1 if part.tensor.layer is None else part.tensor.layer
  )
  shards = list(_shards(parts, max_shard_bytes))
  if len(shards) == 1:
    _write_shard(shards[0], directory / _SINGLE)
    return
  weight_map: dict[str, str] = {}
  for number, shard in enumerate(shards, start=1):
    name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    _write_shard(shard, directory / name)
    weight_map |= {part.tensor.name: name for part in shard}
  total = sum(leaf.nbytes for _, leaf in leaves)
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  write_json(directory / _INDEX, index)


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """A tensor of a file: a parameter, or one layer of it.

  Attributes:
    name: name in the file.
    layer: index of the layer; None for a parameter without an axis of layers.
    shape: shape of the parameter, without the axis of layers.
    dtype: dtype of the parameter.
    transposed: whether the file contains the transpose.
  """

  name: str
  layer: int | None
  shape: tuple[int, ...]
  dtype: np.dtype
  transposed: bool

  @property
  def file_shape(self) -> tuple[int, ...]:
    return self.shape[::-1] if self.transposed else self.shape

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


class _Part(NamedTuple):
  """A tensor and its parameter."""

  tensor: _Tensor
  parameter: Any

  def value(self) -> np.ndarray:
    """Returns the tensor as it is stored in the file."""
    layer = self.tensor.layer
    parameter = self.parameter
    if layer is not None:
      parameter = jax.lax.dynamic_index_in_dim(parameter, layer, keepdims=False)
    value = np.asarray(parameter)
    # safetensors writes the buffer and ignores strides.
    return np.ascontiguousarray(value.T if self.tensor.transposed else value)


def _tensors(path: tuple[Any, ...], leaf: Any) -> list[_Tensor]:
  """Lists the tensors that store a parameter: one, or one per layer."""
  # The last entry of a path is the attribute `value` of the variable.
  *modules, kind = [
    str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)
  ]
  last = "bias" if kind == "bias" else "weight"
  transposed = kind == "kernel"
  if modules[0] != "layers":
    base = [] if modules[0] == "lm_head" else ["model"]
    name = ".".join([*base, *modules, last])
    return [_Tensor(name, None, leaf.shape, leaf.dtype, transposed)]
  count, *shape = leaf.shape
  rest = ".".join([*modules[1:], last])
  return [
    _Tensor(
      f"model.layers.{layer}.{rest}",
      layer,
      tuple(shape),
      leaf.dtype,
      transposed,
    )
    for layer in range(count)
  ]


def _open(directory: pathlib.Path) -> dict[str, Any]:
  """Opens the files; returns the file of each tensor."""
  if (directory / _SINGLE).is_file():
    names = [_SINGLE]
  elif (directory / _INDEX).is_file():
    names = _shard_names(directory / _INDEX)
  else:
    raise InputError(
      f"{directory} has no weights; it should hold {_SINGLE}, or shards and "
      f"{_INDEX}."
    )
  files: dict[str, Any] = {}
  for name in names:
    if not os.path.isfile(directory / name):
      raise InputError(
        f"{directory} lacks the shard {name[:_LONGEST]} that {_INDEX} names."
      )
    try:
      file = safetensors.safe_open(directory / name, framework="numpy")
    except (safetensors.SafetensorError, OSError, MemoryError) as error:
      raise InputError(
        f"{directory / name} is not a complete safetensors file ({error}); "
        "fetch it again."
      ) from error
    files |= dict.fromkeys(file.keys(), file)
  return files


def _shard_names(index: pathlib.Path) -> list[str]:
  weight_map = read_json(index).get("weight_map")
  names = weight_map.values() if isinstance(weight_map, dict) else [None]
  if not all(_is_name(name) for name in names):
    raise InputError(
      f"{index} must have a weight_map that gives each tensor the name of its "
      "file."
    )
  return sorted(set(names))


def _is_name(value: object) -> bool:
  """Whether a value names a file in the folder of the index."""
  return isinstance(value, str) and pathlib.PurePath(value).name == value


def _check(tensors: Tensors, wanted: Sequence[_Tensor]) -> None:
  files, place, original_name = (
    tensors.files,
    tensors.place,
    tensors.original_name,
  )
  for tensor in wanted:
    name = original_name(tensor.name)
    if tensor.name not in files:
      raise InputError(f"The weights in {place} lack the tensor {name}.")
    source = files[tensor.name].get_slice(tensor.name)
    # From the file's header; no data is read yet.
    shape = tuple(source.get_shape())
    if shape != tensor.file_shape:
      raise InputError(
        f"The tensor {name} in {place} has shape {shape}; "
        f"{tensors.described_by} asks for {tensor.file_shape}."
      )
    if source.get_dtype() not in _SOURCE_DTYPES:
      raise InputError(
        f"The tensor {name} in {place} is stored as {source.get_dtype()}; only "
        f"{', '.join(_SOURCE_DTYPES)} are read."
      )
  unknown = set(files) - {tensor.name for tensor in wanted}
  # Old checkpoints store RoPE frequencies, which config.json determines.
  unknown = {n for n in unknown if not n.endswith("rotary_emb.inv_freq")}
  # Some tied checkpoints store the embedding matrix a second time.
  if _OUTPUT in unknown and _equal(files, _OUTPUT, _EMBEDDING):
    unknown.remove(_OUTPUT)
  if unknown:
    raise InputError(
      f"The weights in {place} hold the tensor {original_name(min(unknown))}, "
      f"which the model of {tensors.described_by} does not have."
    )


def _check_finite(
  tensors: Tensors, array: jax.Array, parts: Sequence[_Tensor]
) -> None:
  """Refuses weights that are not finite, without a copy to the host."""
  if bool(_all_finite(array)):
    return
  layered = parts[0].layer is not None
  broken = next(
    tensor
    for layer, tensor in enumerate(parts)
    if not _all_finite(array[layer] if layered else array)
  )
  raise InputError(
    f"The tensor {tensors.original_name(broken.name)} in {tensors.place} holds "
    "NaN or infinite values; fetch it or save it again."
  )


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
  # Under jit, XLA fuses both steps and stores no mask.
  return jnp.isfinite(array).all()


def _equal(files: Mapping[str, Any], first: str, second: str) -> bool:
  return np.array_equal(
    files[first].get_tensor(first), files[second].get_tensor(second)
  )


def _read(
  files: Mapping[str, Any],
  tensors: Sequence[_Tensor],
  shape: tuple[int, ...],
  sharding: jax.sharding.Sharding | None,
) -> jax.Array:
  """Reads a parameter from the tensors that store it."""

  def read_tensor(tensor: _Tensor, index: tuple[slice, ...]) -> np.ndarray:
    source = files[tensor.name].get_slice(tensor.name)
    # A slice of the file, so that only this shard is read.
    return source[index[::-1]].T if tensor.transposed else source[index]

  # Devices with the same shard, along "data", share one read.
  @functools.cache
  def part(index: tuple[slice, ...]) -> np.ndarray:
    sizes = [len(range(n)[i]) for n, i in zip(shape, index, strict=True)]
    # Assignment converts to the parameter's dtype, a layer at a time.
    values = np.empty(sizes, tensors[0].dtype)
    if tensors[0].layer is None:
      values[...] = read_tensor(tensors[0], index)
    else:
      for place, tensor in enumerate(tensors[index[0]]):
        values[place] = read_tensor(tensor, index[1:])
    return values

  if sharding is None:
    return jax.device_put(part((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, sharding, part)


def _shards(parts: Iterable[_Part], max_bytes: int) -> Iterator[list[_Part]]:
  shard: list[_Part] = []
  size = 0
  for part in parts:
    if shard and size + part.tensor.nbytes > max_bytes:
      yield shard
      shard, size = [], 0
    shard.append(part)
    size += part.tensor.nbytes
  yield shard


def _write_shard(shard: Sequence[_Part], path: pathlib.Path) -> None:
  tensors = {part.tensor.name: part.value() for part in shard}
  with files.replacing(path) as unfinished:
    unfinished.touch()
    permissions = unfinished.stat().st_mode
    try:
      # Without this entry transformers refuses the file.
      safetensors.numpy.save_file(
        tensors, unfinished, metadata={"format": "pt"}
      )
    except safetensors.SafetensorError as error:
      raise InputError(
        f"{path} cannot be written: {files.reason(error)}."
      ) from error
    # safetensors creates a file that only its owner can read.
    unfinished.chmod(permissions)
