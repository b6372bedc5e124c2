"""Experts in MXFP4: four-bit numbers, 32 of which share a power of two."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from kvjax.errors import InputError

_BLOCKS, _SCALES = "_blocks", "_scales"
# The numbers of E2M1: a sign, two bits of an exponent, one of a mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
_BIAS = 127


def dequantize(
  blocks: UInt8[np.ndarray, "*B G H"], scales: UInt8[np.ndarray, "*B G"]
) -> Float[np.ndarray, "*B I"]:
  """Restores rows of numbers (OCP Microscaling Formats, version 1.0).

  Args:
    blocks: pairs of numbers, the first in the lower four bits.
    scales: exponents of two, plus 127.
  """
  pairs = np.stack([_NUMBERS[blocks & 15], _NUMBERS[blocks >> 4]], axis=-1)
  exponents = scales.astype(np.int32)[..., None, None] - _BIAS
  restored = np.ldexp(pairs, exponents)
  return restored.reshape(*blocks.shape[:-2], -1)


def join_blocks(
  files: Mapping[str, Any], directory: pathlib.Path
) -> dict[str, Any]:
  """Replaces pairs of blocks and scales by the tensors that they stand for.

  Raises:
    InputError: blocks lack their scales, or the shapes do not fit.
  """
  joined = dict(files)
  for name in files:
    stem = name.removesuffix(_BLOCKS)
    if stem == name:
      continue
    if stem + _SCALES not in files:
      raise InputError(
        f"The weights in {directory} lack the tensor {stem}{_SCALES}, which "
        f"{name} needs."
      )
    blocks = joined.pop(name).get_slice(name)
    scales = joined.pop(stem + _SCALES).get_slice(stem + _SCALES)
    shape = tuple(blocks.get_shape())
    types = {blocks.get_dtype(), scales.get_dtype()}
    if types != {"U8"} or len(shape) != 4 or shape[3] != 16:
      raise InputError(
        f"The tensor {name} in {directory} is not in MXFP4, which has unsigned "
        "bytes of the shape [experts, rows, blocks, 16]."
      )
    if tuple(scales.get_shape()) != shape[:3]:
      raise InputError(
        f"The tensor {stem}{_SCALES} in {directory} must have a scale for each "
        f"block, in the shape {shape[:3]}."
      )
    joined[stem] = _Dequantized(blocks, scales, shape)
  return joined


@dataclasses.dataclass(frozen=True)
class _Dequantized:
  """A file with one tensor, [experts, inputs, outputs], which is dequantized.

  Attributes:
    blocks: slices of [experts, outputs, blocks, 16].
    scales: slices of [experts, outputs, blocks].
    shape: shape of the blocks.
  """

  blocks: Any
  scales: Any
  shape: tuple[int, ...]

  def get_slice(self, name: str) -> "_Dequantized":
    """Returns the slices of the tensor."""
    del name
    return self

  def get_shape(self) -> tuple[int, ...]:
    """Shape of the tensor."""
    experts, outputs, blocks, half = self.shape
    return experts, 2 * half * blocks, outputs

  def get_dtype(self) -> str:
    """The dtype of what is read."""
    return "F32"

  def __getitem__(self, index: tuple[slice, ...]) -> Float[np.ndarray, "..."]:
    experts, inputs, outputs = index
    rows = dequantize(
      self.blocks[experts, outputs], self.scales[experts, outputs]
    )
    return np.swapaxes(rows, 1, 2)[:, inputs]
