"""Reading and writing of decoder weights as safetensors files."""

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jaxtyping import PyTree, Shaped

from kvjax import files
from kvjax.errors import InputError
from kvjax.files import write_json
from kvjax.hosts import read, spread
from kvjax.models.config import DecoderConfig
from kvjax.models.tensor_files import INDEX, Tensors
from kvjax.models.tensor_names import EMBEDDING, OUTPUT, Piece, find_pieces

_SOURCE_DTYPES = ("F32", "F16", "BF16")
_ALIGNMENT = 64
_ROWS = 64


def read_weights(
  tensors: Tensors,
  config: DecoderConfig,
  template: nnx.State,
  shardings: PyTree[jax.sharding.Sharding] | None = None,
) -> nnx.State:
  """Reads the weights of a decoder.

  Names, shapes and dtypes are checked first. Parameters, of all layers, are
  then read one at a time, tensor by tensor. With shardings, a process reads
  only the shards of its devices. The host needs memory for the shards of one
  parameter and for one tensor; if its CPU is the device, for the shards of all
  parameters and for one tensor.

  Args:
    tensors: the tensors to read.
    config: configuration of the decoder.
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
  wanted = [find_pieces(config, path, leaf) for path, leaf in leaves]
  _check(tensors, [piece for each in wanted for piece in each])
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
  config: DecoderConfig,
  directory: pathlib.Path | None,
  max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes weights in the format that `read_weights` reads.

  If they are spread over several hosts, all of them must call it.

  Args:
    params: the decoder's state; dtypes are kept.
    config: configuration of the decoder.
    directory: an existing directory; None on hosts that only have parts of
      what another one writes.
    max_shard_bytes: larger weights are written as several files and an index;
      a single tensor is never split.

  Raises:
    InputError: a file cannot be written.
    OSError: likewise.
  """
  # Takes a while, as where models are downloaded.
  from huggingface_hub import split_state_dict_into_shards_factory

  whole: dict[str, list[_Part]] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    for piece in find_pieces(config, path, leaf):
      whole.setdefault(piece.name, []).append(_Part(piece, leaf))
  split = split_state_dict_into_shards_factory(
    # Sorted by layer, so that a layer is in as few files as possible.
    {name: whole[name] for name in sorted(whole, key=_layer)},
    get_storage_size=lambda parts: sum(part.piece.nbytes for part in parts),
    filename_pattern="model{suffix}.safetensors",
    max_shard_size=max_shard_bytes,
  )
  failure: OSError | InputError | None = None
  for name, shard in split.filename_to_tensors.items():
    # All hosts, to the end: the others would wait for one that stops.
    tensors = {tensor: _whole(whole[tensor]) for tensor in shard}
    if directory is not None and failure is None:
      try:
        _write_shard(tensors, directory / name)
      except (OSError, InputError) as error:
        if not spread(params):
          raise
        failure = error
    del tensors
  if failure is not None:
    raise failure
  if directory is not None and split.is_sharded:
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    write_json(directory / INDEX, index)


class _Part(NamedTuple):
  """A piece and its parameter."""

  piece: Piece
  parameter: Any

  def value(self) -> np.ndarray:
    """Copies the piece to the host."""
    parameter = self.parameter
    for index in self.piece.index:
      parameter = jax.lax.dynamic_index_in_dim(parameter, index, keepdims=False)
    return read(parameter)


def _layer(tensor: str) -> int:
  """Number of the layer of a tensor, by its name; -1 outside of the layers."""
  parts = tensor.split(".")
  return int(parts[2]) if parts[1] == "layers" else -1


def _check(tensors: Tensors, wanted: Sequence[Piece]) -> None:
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
  if OUTPUT in unknown and _equal(files, OUTPUT, EMBEDDING):
    unknown.remove(OUTPUT)
  if unknown == {OUTPUT}:
    raise InputError(
      f"The weights in {place} hold a {original_name(OUTPUT)} that differs "
      f"from the embedding, and {tensors.described_by} ties them; set "
      "tie_word_embeddings to false."
    )
  if unknown:
    raise InputError(
      f"The weights in {place} hold the tensor {original_name(min(unknown))}, "
      f"which the model of {tensors.described_by} does not have."
    )


def _check_finite(
  tensors: Tensors, array: jax.Array, pieces: Sequence[Piece]
) -> None:
  """Refuses weights that are not finite, without a copy to the host."""
  if is_finite(array):
    return
  broken = next(piece for piece in pieces if not is_finite(array[piece.index]))
  raise InputError(
    f"The tensor {tensors.original_name(broken.name)} in {tensors.place} holds "
    "NaN or infinite values; fetch it or save it again."
  )


def is_finite(array: jax.Array) -> bool:
  """Says whether all elements of an array are finite."""
  return bool(_all_finite(array))


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
  pieces: Sequence[Piece],
  shape: tuple[int, ...],
  sharding: jax.sharding.Sharding | None,
) -> jax.Array:
  """Reads a parameter from the tensors that store it."""
  leading = len(pieces[0].index)

  # Devices with the same shard, along "data", share one read.
  @functools.cache
  def part(index: tuple[slice, ...]) -> np.ndarray:
    ranges = [range(n)[i] for n, i in zip(shape, index, strict=True)]
    # Assignment converts to the parameter's dtype, a piece at a time.
    values = _empty(tuple(len(each) for each in ranges), pieces[0].dtype)
    for piece in pieces:
      own = list(zip(piece.index, ranges[:leading], strict=True))
      if all(number in each for number, each in own):
        leads = (each.index(number) for number, each in own)
        # A view, even of a single number.
        place: tuple[Any, ...] = (*leads, ...)
        source = files[piece.name].get_slice(piece.name)
        # A slice of the file, so that only this shard is read.
        _copy(values[place], piece.read(source, index[leading:]))
    return values

  if sharding is None:
    return jax.device_put(part((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, sharding, part)


def _copy(target: Shaped[np.ndarray, "..."], source: np.ndarray) -> None:
  """Copies an array, a few rows of the file at a time if it is transposed.

  These fit a processor's cache: NumPy alone takes two to four times as long.
  """
  if source.flags.c_contiguous:
    target[...] = source
    return
  for start in range(0, source.shape[-1], _ROWS):
    rows = ..., slice(start, start + _ROWS)
    target[rows] = source[rows]


def _empty(
  shape: tuple[int, ...], dtype: np.dtype
) -> Shaped[np.ndarray, "..."]:
  """Allocates an array at a multiple of 64 bytes.

  A CPU device uses such an array as it is, and copies others.
  """
  nbytes = math.prod(shape) * dtype.itemsize
  memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  return memory[start : start + nbytes].view(dtype).reshape(shape)


def _whole(parts: Sequence[_Part]) -> np.ndarray:
  """Puts a tensor together from its pieces."""
  piece = parts[0].piece
  # A new array: safetensors writes the buffer and ignores strides.
  tensor = np.empty(piece.file_shape, piece.dtype)
  for part in parts:
    part.piece.write(tensor, part.value())
  return tensor


def _write_shard(
  tensors: Mapping[str, Shaped[np.ndarray, "..."]], path: pathlib.Path
) -> None:
  with files.replacing(path) as unfinished:
    unfinished.touch()
    permissions = unfinished.stat().st_mode
    try:
      # Without this entry transformers refuses the file.
      safetensors.numpy.save_file(
        dict(tensors), unfinished, metadata={"format": "pt"}
      )
    except safetensors.SafetensorError as error:
      raise InputError(
        f"{path} cannot be written: {files.reason(error)}."
      ) from error
    # safetensors creates a file that only its owner can read.
    unfinished.chmod(permissions)
