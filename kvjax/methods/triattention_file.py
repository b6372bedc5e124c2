"""Statistics of queries for TriAttention, from kvjax or the authors."""

import pathlib
import re
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.errors import InputError
from kvjax.methods.stored import Stored, read_once
from kvjax.methods.torch_files import read_torch, stack_tensors

# The center of a head's queries, and the mean length of each of their pairs.
CENTER, LENGTHS = "query_mean", "query_abs"
_HEAD = re.compile(r"layer(\d{2,4})_head(\d{2,4})")
_PARTS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


def read_statistics(path: str) -> Stored:
  """Reads the statistics of all layers and query heads; see `read_once`.

  Args:
    path: a file of `kvjax.calibrate_queries`, a folder with one, or a file
      named *.pt that the authors' code has written. That has a dictionary
      `stats`, in which layer00_head00 and so on have, for each of the D/2
      pairs of channels, the numbers of `_PARTS`.

  Raises:
    InputError: there is no such file, or it has something else.
  """
  if path.endswith(".pt"):
    return read_once(path, _read_published)
  return Stored.read(path, {CENTER: 3, LENGTHS: 3})


def _read_published(file: pathlib.Path) -> Stored:
  """Reads a file of the authors' code."""
  content = read_torch(file)
  content = content if isinstance(content, dict) else {}
  stats, about = content.get("stats"), content.get("metadata")
  heads = _heads(file, stats)
  style = about.get("rope_style") if isinstance(about, dict) else None
  if style not in (None, "half", "interleaved"):
    raise InputError(
      f"rope_style of {file} must be half or interleaved; it is {style!r:.40}."
    )

  def stack(part: str) -> Float[np.ndarray, "L N F"]:
    flat = [of_head.get(part) for row in heads for of_head in row]
    stacked = stack_tensors(file, part, flat, 1, "head")
    return stacked.reshape(len(heads), len(heads[0]), -1)

  real, imaginary, lengths = map(stack, _PARTS)
  if real.shape != imaginary.shape or real.shape != lengths.shape:
    raise InputError(f"{' and '.join(_PARTS)} of {file} differ in size.")

  def pairs(
    one: Float[np.ndarray, "L N F"], other: Float[np.ndarray, "L N F"]
  ) -> Float[np.ndarray, "L N D"]:
    if style == "interleaved":
      return np.stack([one, other], axis=-1).reshape(*one.shape[:2], -1)
    return np.concatenate([one, other], axis=-1)

  arrays = {CENTER: pairs(real, imaginary), LENGTHS: pairs(lengths, lengths)}
  return Stored(file, arrays)


def _heads(file: pathlib.Path, stats: Any) -> list[list[dict[str, Any]]]:
  """What a file says of each head of each layer, all of which it must have."""
  named = {}
  for name, of_head in stats.items() if isinstance(stats, dict) else ():
    found = _HEAD.fullmatch(str(name))
    if found and isinstance(of_head, dict):
      named[int(found[1]), int(found[2])] = of_head
  layers, heads = (1 + max((n[i] for n in named), default=-1) for i in (0, 1))
  if not named or len(named) != layers * heads:
    raise InputError(
      f"{file} must have stats of all heads of all layers, named "
      "layer00_head00 and so on, as TriAttention's code writes them; it has "
      f"those of {len(named)} heads."
    )
  return [[named[n, head] for head in range(heads)] for n in range(layers)]
