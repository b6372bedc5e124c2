"""What is measured, and the least that it could take."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.model import Geometry

# Shapes of a layer of Llama-3.1-8B.
LAYER = {"heads": 32, "kv_heads": 8, "dim": 128}


@dataclasses.dataclass(frozen=True)
class Work:
  """The least that a device must do.

  Attributes:
    operations: of matrix products.
    moved: bytes read and written.
  """

  operations: float = 0.0
  moved: float = 0.0

  def seconds(self, limits: Mapping[str, float]) -> float:
    """The least time, given operations and bytes per second of a device."""
    return max(
      self.operations / limits["operations"], self.moved / limits["bytes"]
    )


@dataclasses.dataclass(frozen=True)
class Case:
  """One line of a table.

  Attributes:
    label: of the line.
    operation: what a worker is asked for.
    arguments: of the operation.
    work: the least work; None if nobody counted it.
    per_row: whether a peer takes rows one after another, so that one of them
      is measured for all.
  """

  label: str
  operation: str
  arguments: Mapping[str, Any]
  work: Work | None = None
  per_row: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of a model.

  Attributes:
    geometry: of its layers.
    layer_weights: numbers in all layers' weights, without the embedding.
    head_weights: numbers that the logits are computed from.
    itemsize: bytes of a number, of weights and of the cache.
  """

  geometry: Geometry
  layer_weights: int
  head_weights: int
  itemsize: int

  def prefill(self, rows: int, length: int) -> Work:
    """The work of a forward pass without logits, which is causal."""
    attention = sum(
      layer.heads * (layer.key_dim + layer.value_width)
      for layer in self.geometry.layers
    )
    # A product of n numbers takes n multiplications and n additions.
    return Work(
      2.0 * rows * (self.layer_weights * length + attention * length**2 / 2)
    )

  def decode(self, rows: int, kept: float, tokens: int) -> Work:
    """The work of decoding tokens from rows with `kept` cached tokens each."""
    cached = sum(
      layer.kv_heads * (layer.key_dim + layer.value_width)
      for layer in self.geometry.layers
    )
    weights = self.layer_weights + self.head_weights
    return Work(
      2.0 * rows * weights * tokens,
      self.itemsize * tokens * (weights + rows * kept * cached),
    )


def prefill_case(
  sizes: Sizes, method: str, retention: float, rows: int, length: int
) -> Case:
  """A prefill that ends with a compressed cache."""
  return Case(
    f"{method}, {length:,} tokens",
    "prefill",
    dict(method=method, retention=retention, rows=rows, length=length),
    sizes.prefill(rows, length),
  )


def decode_case(
  sizes: Sizes,
  method: str,
  retention: float,
  rows: int,
  length: int,
  new_tokens: int,
) -> Case:
  """Decoding from a compressed cache."""
  kept = length * (1.0 if method == "full" else retention)
  return Case(
    f"{method}, {new_tokens:,} tokens after {rows} x {length:,}",
    "decode",
    dict(
      method=method,
      retention=retention,
      rows=rows,
      length=length,
      new_tokens=new_tokens,
    ),
    sizes.decode(rows, kept, new_tokens),
  )


def compress_case(
  method: str, retention: float, length: int, itemsize: int
) -> Case:
  """Scoring and compaction of a layer whose attention has been computed."""
  token = LAYER["kv_heads"] * LAYER["dim"] * 2 * itemsize
  return Case(
    f"{method}, {length:,} tokens",
    "compress",
    dict(method=method, retention=retention, length=length, **LAYER),
    # Keys or values that are not kept need not both be read.
    Work(moved=token * length * (0.5 + 1.5 * retention)),
  )


def leaderboard_case(
  methods: Sequence[str],
  retentions: Sequence[float],
  rows: int,
  length: int,
  new_tokens: int,
) -> Case:
  """Answers to some prompts by all methods at all retentions."""
  cells = [(method, share) for method in methods for share in retentions]
  return Case(
    f"{len(cells)} caches of {rows} prompts of {length:,} tokens, "
    f"{new_tokens} tokens each",
    "answer",
    dict(cells=cells, rows=rows, length=length, new_tokens=new_tokens),
    per_row=True,
  )
