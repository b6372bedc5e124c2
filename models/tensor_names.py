"""Names and layouts of a decoder's tensors in Hugging Face's files.

A parameter's path in the decoder is its name in the file, with these
exceptions. All names but that of the output matrix begin with `model.`. The
last part is `weight` or `bias`, and sinks have none. Matrices are stored
transposed ([out, in]). A parameter with an axis of layers is stored as one
tensor per layer, under `model.layers.0` and so on. Experts are stored one by
one, or as stacks whose gate and up projections alternate. Some families store
the projections of one input as one tensor.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.models.config import DecoderConfig

OUTPUT = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_EXPERTS = "mlp.experts."
_ROUTER = "mlp.router"

# The parts of tensors that several projections share, in order.
_FUSED = {
  "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
  "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}


class Part(NamedTuple):
  """A part of a tensor along one axis.

  Attributes:
    axis: the axis, of the tensor as it is stored.
    start: the first index.
    step: distance to the next one.
    size: size of the whole axis.
  """

  axis: int
  start: int
  step: int
  size: int


@dataclasses.dataclass(frozen=True)
class Piece:
  """A piece of a parameter, and where a file has it.

  Attributes:
    name: name of the tensor in the file.
    index: leading indices of the piece in the parameter: the layer in its
      stack, and the expert; empty for a whole parameter.
    shape: shape of the piece in the parameter.
    dtype: dtype of the parameter.
    transposed: whether the file contains the transpose.
    part: the part of the tensor that the piece is; None for all of it.
  """

  name: str
  index: tuple[int, ...]
  shape: tuple[int, ...]
  dtype: np.dtype
  transposed: bool = False
  part: Part | None = None

  @property
  def file_shape(self) -> tuple[int, ...]:
    """Shape of the tensor in the file."""
    shape = list(self.shape[::-1] if self.transposed else self.shape)
    if self.part is not None:
      shape[self.part.axis] = self.part.size
    return tuple(shape)

  @property
  def nbytes(self) -> int:
    """Bytes of the piece as a parameter."""
    return math.prod(self.shape) * self.dtype.itemsize

  def place(self, index: Sequence[slice]) -> tuple[slice, ...]:
    """Where the tensor has a slice of the piece."""
    place = list(index[::-1] if self.transposed else index)
    if self.part is not None:
      axis, start, step, _ = self.part
      own = self.shape[::-1] if self.transposed else self.shape
      low, high, _ = place[axis].indices(own[axis])
      place[axis] = slice(start + low * step, start + (high - 1) * step + 1)
    return tuple(place)

  def read(self, source: Any, index: Sequence[slice]) -> np.ndarray:
    """Reads a slice of the piece.

    Args:
      source: a slice of a file, as safetensors' `get_slice` returns it.
      index: the slice, in the parameter's axes.
    """
    values = source[self.place(index)]
    if self.part is not None and self.part.step > 1:
      # Files are read in one piece.
      every = [slice(None)] * values.ndim
      every[self.part.axis] = slice(None, None, self.part.step)
      values = values[tuple(every)]
    return values.T if self.transposed else values

  def write(self, target: np.ndarray, value: np.ndarray) -> None:
    """Writes the piece into its tensor."""
    place: list[slice] = [slice(None)] * target.ndim
    if self.part is not None:
      place[self.part.axis] = slice(
        self.part.start,
        self.part.start
        + (value.shape[self._own_axis] - 1) * self.part.step
        + 1,
        self.part.step,
      )
    target[tuple(place)] = value.T if self.transposed else value

  @property
  def _own_axis(self) -> int:
    """The axis of the part, in the parameter."""
    assert self.part is not None
    last = len(self.shape) - 1
    return last - self.part.axis if self.transposed else self.part.axis


def find_pieces(
  config: DecoderConfig, path: tuple[Any, ...], leaf: Any
) -> list[Piece]:
  """Lists the pieces of a parameter.

  Args:
    config: configuration of the decoder.
    path: path of the parameter in the decoder's state.
    leaf: the parameter, or its shape and dtype.
  """
  # The last entry of a path is the attribute `value` of the variable.
  *modules, kind = [
    str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)
  ]
  if modules[:1] != ["layers"]:
    base = [] if modules[0] == "lm_head" else ["model"]
    name = _with_suffix(".".join([*base, *modules]), kind)
    return [Piece(name, (), leaf.shape, leaf.dtype, kind == "kernel")]
  module = ".".join(modules[2:])
  numbers = config.layers_of(int(modules[1]))
  return [
    dataclasses.replace(
      piece,
      name=f"model.layers.{layer}.{piece.name}",
      index=(place, *piece.index),
    )
    for place, layer in enumerate(numbers)
    for piece in _in_layer(config, module, kind, leaf.shape[1:], leaf.dtype)
  ]


def _in_layer(
  config: DecoderConfig,
  module: str,
  kind: str,
  shape: tuple[int, ...],
  dtype: np.dtype,
) -> Iterator[Piece]:
  """Yields the pieces of one layer, by their names in it."""
  family = config.family
  if module.startswith(_EXPERTS):
    projection = module.removeprefix(_EXPERTS)
    if family.stacked_experts:
      yield _stacked_experts(projection, kind, shape, dtype)
      return
    for expert in range(shape[0]):
      name = _with_suffix(f"{_EXPERTS}{expert}.{projection}", kind)
      yield Piece(name, (expert,), shape[1:], dtype, kind == "kernel")
    return
  if module == _ROUTER:
    module = family.router
  projection = module.rpartition(".")[2]
  for fused, names in _FUSED.items():
    if family.fused and projection in names:
      widths = [_width(config, name) for name in names]
      start = sum(widths[: names.index(projection)])
      part = Part(0, start, 1, sum(widths))
      name = _with_suffix(fused, kind)
      yield Piece(name, (), shape, dtype, kind == "kernel", part)
      return
  if kind == "sinks":
    yield Piece(f"{module}.sinks", (), shape, dtype)
    return
  yield Piece(_with_suffix(module, kind), (), shape, dtype, kind == "kernel")


def _stacked_experts(
  projection: str, kind: str, shape: tuple[int, ...], dtype: np.dtype
) -> Piece:
  """All experts in one tensor, whose gate and up projections alternate."""
  suffix = "_bias" if kind == "bias" else ""
  if projection == "down_proj":
    return Piece(f"{_EXPERTS}down_proj{suffix}", (), shape, dtype)
  start = ("gate_proj", "up_proj").index(projection)
  part = Part(len(shape) - 1, start, 2, 2 * shape[-1])
  name = f"{_EXPERTS}gate_up_proj{suffix}"
  return Piece(name, (), shape, dtype, part=part)


def _with_suffix(module: str, kind: str) -> str:
  return f"{module}.{'bias' if kind == 'bias' else 'weight'}"


def _width(config: DecoderConfig, projection: str) -> int:
  heads = {
    "q_proj": config.num_heads,
    "k_proj": config.num_kv_heads,
    "v_proj": config.num_kv_heads,
  }
  if projection in heads:
    return heads[projection] * config.head_dim
  return config.intermediate_size
