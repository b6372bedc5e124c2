"""Training rows: token ids with loss weights, packed to arrays."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Weight of an answer's first symbol, which requires retrieval; later symbols
# only continue the copy.
FIRST_WEIGHT = 3.0
BACKGROUND_WEIGHT = 0.05
_MOST_BACKGROUND_WEIGHT = 0.25
_LEAST_BACKGROUND_SLOTS = 8


@dataclasses.dataclass
class Row:
  """One sequence under construction.

  Attributes:
    tokens: ids.
    answer: number of the answer of each token, -1 for none.
    first: whether each token is the first symbol of a value, or of a key in an
      answer, and so requires retrieval.
  """

  tokens: list[int] = dataclasses.field(default_factory=list)
  answer: list[int] = dataclasses.field(default_factory=list)
  first: list[bool] = dataclasses.field(default_factory=list)
  answers: int = 0

  def __len__(self) -> int:
    return len(self.tokens)

  def add(self, ids: Sequence[int]) -> None:
    """Appends tokens that are not scored as an answer."""
    self.tokens.extend(ids)
    self.answer.extend([-1] * len(ids))
    self.first.extend([False] * len(ids))

  def add_answer(self, ids: Sequence[int], firsts: Sequence[int]) -> None:
    """Appends an answer; `firsts` are the indices of its first symbols."""
    start = len(self.tokens)
    self.tokens.extend(ids)
    self.answer.extend([self.answers] * len(ids))
    self.first.extend([False] * len(ids))
    for place in firsts:
      self.first[start + place] = True
    self.answers += 1

  def extend(self, other: "Row") -> None:
    """Appends another row."""
    self.tokens.extend(other.tokens)
    self.answer.extend(
      number if number < 0 else number + self.answers for number in other.answer
    )
    self.first.extend(other.first)
    self.answers += other.answers


class Batch(NamedTuple):
  """Rows of one length, with the scored places; arrays of NumPy or JAX.

  Attributes:
    tokens: token ids.
    place: the position that predicts the target.
    target: the token that follows it.
    weight: of the loss, 0 for unused slots.
    answer: number of the answer in its row, -1 for none.
    first: first symbols, see `Row`.
  """

  tokens: Int[Array | np.ndarray, "B T"]
  place: Int[Array | np.ndarray, "B M"]
  target: Int[Array | np.ndarray, "B M"]
  weight: Float[Array | np.ndarray, "B M"]
  answer: Int[Array | np.ndarray, "B M"]
  first: Bool[Array | np.ndarray, "B M"]


def pack(
  rows: Sequence[Row],
  length: int,
  slots: int,
  pad: int,
  rng: np.random.Generator,
) -> Batch:
  """Packs rows to `length` tokens with `slots` scored places each.

  Answer tokens get slots first; random background tokens get the rest.
  """
  count = len(rows)
  tokens = np.full((count, length), pad, np.int32)
  place = np.zeros((count, slots), np.int32)
  target = np.full((count, slots), pad, np.int32)
  weight = np.zeros((count, slots), np.float32)
  answer = np.full((count, slots), -1, np.int32)
  first = np.zeros((count, slots), bool)
  for index, row in enumerate(rows):
    used = min(len(row), length)
    tokens[index, :used] = row.tokens[:used]
    number = np.asarray(row.answer[1:used], np.int32)
    answer_places = np.flatnonzero(number >= 0)[
      : slots - _LEAST_BACKGROUND_SLOTS
    ]
    other = np.flatnonzero(number < 0)
    drawn = min(slots - len(answer_places), len(other))
    background = rng.choice(other, drawn, replace=False)
    chosen = np.concatenate([answer_places, background])
    filled = len(chosen)
    place[index, :filled] = chosen
    target[index, :filled] = tokens[index, chosen + 1]
    answer[index, :filled] = number[chosen]
    is_first = np.asarray(row.first[1:used], bool)[chosen]
    first[index, :filled] = is_first
    share = BACKGROUND_WEIGHT * len(other) / max(drawn, 1)
    weight[index, :filled] = np.where(
      number[chosen] < 0,
      min(share, _MOST_BACKGROUND_WEIGHT),
      np.where(is_first, FIRST_WEIGHT, 1.0),
    )
  return Batch(tokens, place, target, weight, answer, first)
