"""What is measured of a cache and its answer, and with how many digits."""

import dataclasses
from typing import Any


def _to(digits: int, **options: Any) -> Any:
  """Declares a field that is rounded to these digits where it is averaged."""
  return dataclasses.field(metadata={"digits": digits}, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """What is measured of a cache and the answer from it, or means of that.

  Attributes:
    retention: share of the context that the budget, or its calibration, allows,
      or that reaches its threshold.
    context_tokens: tokens of the context; includes the question if it is
      prefilled, and all turns so far if they stay in the cache.
    kept_tokens: tokens kept of these, mean over layers and KV heads.
    read_tokens: tokens that a token attends to, likewise; for retrieval, the
      resident tokens and the keys that the last prompt token retrieved.
    cache_bytes: bytes allocated for the compressed context.
    host_bytes: the part of these in host memory.
    global_tokens: tokens kept in layers without a window, which budgets are of,
      mean over these and KV heads; None unless some layers have a window and
      others have none.
    answer_tokens: tokens of the answer; None in older records.
    decoding_bytes: bytes that cache and answer take while it is decoded from
      this cache alone; None in older records.
  """

  retention: float = _to(4)
  context_tokens: float = _to(2)
  kept_tokens: float = _to(2)
  read_tokens: float = _to(2)
  cache_bytes: float = _to(0)
  host_bytes: float = _to(0)
  global_tokens: float | None = _to(2, default=None)
  answer_tokens: float | None = _to(2, default=None)
  decoding_bytes: float | None = _to(0, default=None)


# By the names of the fields.
DIGITS: dict[str, int] = {
  field.name: field.metadata["digits"] for field in dataclasses.fields(Measured)
}


def rounded(name: str, value: float | None) -> float | None:
  """Rounds the mean of a field; without digits, to a whole number."""
  return None if value is None else round(value, DIGITS[name] or None)
