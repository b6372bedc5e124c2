"""Batches of prompts of unequal lengths, padded to few shapes."""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.errors import InputError
from kvjax.hosts import is_traced
from kvjax.options.bounds import check_count
from kvjax.repeat_request import RepeatRequest
from kvjax.struct import static, struct

_SMALLEST_BUCKET = 32


def bucket(length: int) -> int:
  """Returns the padded length: 32, 48, 64, 96, ..., 256, 384, 512, 640, ...

  Prompts of one bucket share a compiled program. Buckets are half a power of
  two apart up to 256, then 128 and at most an eighth of their size apart.
  """
  if length <= _SMALLEST_BUCKET:
    return _SMALLEST_BUCKET
  step = _step(length)
  return -(-length // step) * step


def bucket_lengths(padded: int) -> range:
  """Lengths that are padded to `padded`."""
  if padded <= _SMALLEST_BUCKET:
    return range(1, padded + 1)
  return range(padded - _step(padded) + 1, padded + 1)


def _step(length: int) -> int:
  """Distance between the buckets around a length."""
  power = 1 << ((length - 1).bit_length() - 1)  # the one below the length
  return max(power // 8, min(power // 2, 128))


# Rows of token ids; an array has rows of equal lengths, here n.
Rows = Sequence[Sequence[int]] | Int[np.ndarray, "B n"]


@struct
class Prompts:
  """A batch of token rows, padded on the right.

  Raises InputError if tokens, lengths or mask are not arrays of these types and
  shapes, a length is below 1 or beyond the width of the rows, or lengths are
  traced, as within `jax.jit`.

  Attributes:
    tokens: token ids; arbitrary after the end of a row.
    lengths: number of tokens of each row.
    protected: mask of the tokens that no method may evict, if there are any;
      of padding it says nothing.
    repeat_request: what precedes the chunks of a prompt that a method replays,
      as KVzip does; by default nothing.

  Examples:
    >>> import kvjax
    >>> prompts = kvjax.Prompts.of([[1, 2, 3, 4], [5, 6]])
    >>> prompts.lengths.tolist()
    [4, 2]
    >>> prompts.tokens.shape
    (2, 32)
  """

  tokens: Int[Array, "B S"] | Int[np.ndarray, "B S"]
  lengths: Int[Array, " B"] | Int[np.ndarray, " B"]
  protected: Bool[np.ndarray, "B S"] | None = None
  repeat_request: RepeatRequest = static(default=RepeatRequest())

  def __post_init__(self) -> None:
    _check_integers("Tokens of prompts", self.tokens, 2)
    _check_integers("Lengths of prompts", self.lengths, 1)
    (rows, width), mask = self.tokens.shape, self.protected
    # Before they are narrowed, which would hide numbers beyond 32 bits.
    lengths = _known(self.lengths)
    if lengths.size != rows:
      raise InputError(
        f"There are {rows} prompts and {lengths.size} lengths; give one each."
      )
    kind = getattr(mask, "dtype", None)
    if mask is not None and (kind, np.shape(mask)) != (np.bool_, (rows, width)):
      raise InputError(
        "What is protected is true or false for every token, padding included: "
        f"give a mask of the shape of the tokens, {rows} x {width}."
      )
    if not isinstance(self.repeat_request, RepeatRequest):
      raise InputError(
        "The request to repeat a prompt is a kvjax.RepeatRequest, such as "
        f"kvjax.RepeatRequest.of(lm.text); {self.repeat_request!r} is not."
      )
    if np.any(lengths < 1) or np.any(lengths > width):
      raise InputError(
        f"Lengths must be between 1 and the {width} tokens that rows are "
        f"padded to; they are {lengths.tolist()}."
      )
    if mask is not None:
      # What follows a row, a question say, gets the positions of its padding.
      real = np.arange(width)[None] < lengths[:, None]
      object.__setattr__(self, "protected", _known(mask) & real)

  @classmethod
  def of(
    cls,
    rows: Rows,
    padded: int | None = None,
    protected: Sequence[Sequence[bool]] | None = None,
    repeat_request: RepeatRequest | None = None,
  ) -> "Prompts":
    """Pads rows of token ids, by default to the bucket of the longest.

    Args:
      rows: token ids.
      padded: width of the batch, which need not be one of the buckets.
      protected: for each token of each row, whether it must be kept, such as
        the tokens of a system prompt or of the last turn.
      repeat_request: what precedes the chunks of a prompt that a method
        replays, such as `kvjax.RepeatRequest.of(lm.text)`.

    Raises:
      InputError: there is no row, one is empty, longer than `padded` or has
        other things than token ids, or `protected` has other lengths than the
        rows.
    """
    check_rows(rows)
    if not len(rows):
      raise InputError("There are no prompts; give at least one.")
    for index, row in enumerate(rows):
      if not len(row):
        raise InputError(
          f"Prompt {index} has no tokens; every prompt needs at least one."
        )
    _check_ids(rows)
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = int(lengths.max())
    if padded is not None:
      check_count("padded", padded, 0)
    width = bucket(longest) if padded is None else padded
    if width < longest:
      raise InputError(
        f"Prompts of up to {longest} tokens cannot be padded to {width}; give "
        f"padded={longest} or more, or leave it out."
      )
    tokens, request = _pad(rows, width, np.int32), repeat_request
    request = RepeatRequest() if request is None else request
    if protected is None:
      return cls(tokens, lengths, None, request)
    _check_protected(protected, lengths.tolist())
    mask = _pad(protected, width, np.bool_)
    return cls(tokens, lengths, mask, request)

  @property
  def known_lengths(self) -> Int[np.ndarray, " B"]:
    """The lengths on the host, in 32 bits whatever their own dtype.

    Raises:
      InputError: they are traced, as within `jax.jit`.
    """
    return _known(self.lengths).astype(np.int32)

  def rows(self) -> list[list[int]]:
    """Returns the tokens as lists.

    Raises:
      InputError: they are traced, as within `jax.jit`.
    """
    tokens, lengths = _known(self.tokens), self.known_lengths
    return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]

  def repeat(self, times: int) -> "Prompts":
    """Repeats the batch, one copy after another.

    Raises:
      InputError: `times` is no whole number of 1 or more.
    """
    check_count("The number of copies", times)
    mask = self.protected
    return Prompts(
      np.tile(_known(self.tokens), (times, 1)),
      np.tile(self.known_lengths, times),
      None if mask is None else np.tile(mask, (times, 1)),
      self.repeat_request,
    )

  def row(self, index: int) -> "Prompts":
    """Returns a batch of one row, with the same padding.

    Raises:
      InputError: there is no such row.
    """
    numbers = range(len(self.tokens))
    if not hasattr(index, "__index__") or index not in numbers:
      raise InputError(
        f"There is no row {index!r} of prompts; the rows are 0 to "
        f"{len(self.tokens) - 1}."
      )
    rows = slice(index, index + 1)
    protected = None if self.protected is None else self.protected[rows]
    return dataclasses.replace(
      self,
      tokens=self.tokens[rows],
      lengths=self.lengths[rows],
      protected=protected,
    )


def _check_integers(name: str, array: Any, dimensions: int) -> None:
  """Refuses what is not an array of integers, or has other dimensions."""
  # Not by `np.asarray`: traced arrays have no values.
  kind = getattr(getattr(array, "dtype", None), "kind", "")
  if kind not in ("i", "u") or len(array.shape) != dimensions:
    raise InputError(
      f"{name} must be a {dimensions}-dimensional array of whole numbers, and "
      "these are not; kvjax.Prompts.of makes prompts of lists."
    )


def check_batch(prompts: Any) -> None:
  """Refuses what is not `Prompts`, for callers without a type checker.

  Raises:
    InputError: it is something else.
  """
  if not isinstance(prompts, Prompts):
    raise InputError(
      f"Prompts must be kvjax.Prompts, and a {type(prompts).__name__} is not; "
      "make them of lists of tokens with kvjax.Prompts.of."
    )


def check_unprotected(prompts: Prompts) -> None:
  """Refuses a mask in what follows a prefill.

  Raises:
    InputError: there is one.
  """
  if prompts.protected is not None:
    raise InputError(
      "Tokens can be protected in what is prefilled only; give what follows "
      "without a mask."
    )


def _known(
  array: Shaped[Array, "..."] | Shaped[np.ndarray, "..."],
) -> Shaped[np.ndarray, "..."]:
  if is_traced(array):
    raise InputError(
      "Prompts cannot be arguments of jax.jit, as their lengths decide what is "
      "compiled; let the function that it compiles refer to them."
    )
  return np.asarray(array)


def check_rows(rows: Any) -> None:
  """Checks types, for callers without a static type checker.

  Raises:
    InputError: these are no rows.
  """
  for row in rows if hasattr(rows, "__len__") else [rows]:
    if isinstance(row, str) or not hasattr(row, "__len__"):
      raise InputError(
        "Prompts are rows of token ids, as in [[5, 7], [9]]; "
        f"{reprlib.repr(row)} is no row."
      )


def _check_ids(rows: Rows) -> None:
  for row in rows:
    try:
      ids = np.asarray(row)
    except ValueError:  # lists among the ids
      ids = np.asarray(None)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
      raise InputError(
        f"Token ids must be whole numbers; those of {reprlib.repr(row)} are "
        "not."
      )
    if np.any((ids < 0) | (ids >= 2**31)):
      raise InputError(
        f"Token ids must be 0 or more, and below {2**31}; those of "
        f"{reprlib.repr(row)} are not."
      )


def _check_protected(protected: Any, lengths: list[int]) -> None:
  """Refuses what does not say of every token whether it is protected."""
  try:
    masks = [np.asarray(row) for row in protected]
  except (TypeError, ValueError):
    masks = []
  shapes = [(length,) for length in lengths]
  if [mask.shape for mask in masks] != shapes:
    raise InputError(
      "What is protected is said of every token: give as many values as each "
      f"row has tokens, {lengths}."
    )
  if any(mask.dtype != np.bool_ for mask in masks):
    raise InputError(
      "What is protected is true or false for every token; "
      f"{reprlib.repr(protected)} is not."
    )


def _pad(
  rows: Rows | Sequence[Sequence[bool]], width: int, dtype: type
) -> Shaped[np.ndarray, "B S"]:
  filled: np.ndarray = np.zeros((len(rows), width), dtype)
  for into, row in zip(filled, rows, strict=True):
    into[: len(row)] = row
  return filled
