"""How much of a passage, such as a needle, the heads keep or read."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from kvjax.errors import InputError
from kvjax.experiments.kept.counts import Kept
from kvjax.model import Geometry


class Share(NamedTuple):
  """What the mean head keeps of a passage.

  Attributes:
    mean: tokens of the passage in the mean head.
    tokens: tokens of the passage.
    least: tokens in the mean head of the layer that keeps the fewest.
    layer: that layer, the first being 0; the first of several.
  """

  mean: float
  tokens: int
  least: float
  layer: int

  def __str__(self) -> str:
    """Formats it: `5.9 of 7 tokens, fewest in layer 5: 4`."""
    return (
      f"{self.mean:.1f} of {self.tokens} tokens, fewest in layer "
      f"{self.layer}: {self.least:.1f}"
    )


def find(pieces: Sequence[str], text: str) -> Int[np.ndarray, " t"]:
  """Returns the numbers of the tokens that hold a passage, where it is first.

  Args:
    pieces: the text of each token.
    text: the passage.

  Raises:
    InputError: the passage is empty, or is not in the text.

  Examples:
    >>> find(["It is", " 4", "2", "."], "42").tolist()
    [1, 2]
  """
  start = "".join(pieces).find(text) if text else -1
  if start < 0:
    raise InputError(f"The text does not contain the passage {text[:80]!r}.")
  ends = np.cumsum([len(piece) for piece in pieces])
  begins = np.append(0, ends[:-1])
  return np.flatnonzero((ends > start) & (begins < start + len(text)))


def share(
  result: Kept, places: Int[np.ndarray, " t"], geometry: Geometry
) -> Share:
  """Counts the tokens of a passage in the layers that see the whole context.

  Methods leave layers with windows alone.

  Args:
    result: what a candidate keeps.
    places: numbers of the passage's tokens.
    geometry: of the model.
  """
  cached = [number for number, s in enumerate(geometry.layers) if s.cache]
  whole: Bool[np.ndarray, " L"] = np.array(
    [geometry.layers[number].compressible for number in cached]
  )
  heads = np.array([geometry.layers[number].kv_heads for number in cached])
  by_layer = (result.heads[:, places].sum(axis=1) / heads)[whole]
  fewest = int(by_layer.argmin())
  return Share(
    mean=float(by_layer.mean()),
    tokens=len(places),
    least=float(by_layer[fewest]),
    layer=int(np.array(cached)[whole][fewest]),
  )
