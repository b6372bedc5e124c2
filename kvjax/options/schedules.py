"""When a method compresses: after the prompt, its blocks, or while decoding."""

import dataclasses

from kvjax.errors import InputError
from kvjax.options.bounds import check_count


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When a method compresses; by default once, after the whole prompt.

  With `block`, the prompt is processed in blocks. Each block attends to the
  cache and to itself and is appended to the cache, then the method evicts. No
  layer ever contains more tokens than its budget and one block. Later blocks
  attend to what the earlier evictions kept. KeyDiff's paper (arXiv 2504.15364)
  calls this block prompt processing. With LagKV (arXiv 2504.04704), a first
  block of S + 2 L and blocks of L, it is the paper's chunked prefill.

  With `every`, the method also evicts while decoding: after a question, after
  every `every` tokens of the answer, and after its last one.

  Raises InputError if a size is no whole number of 1 or more, or `first` is
  given without `block`.

  Attributes:
    block: tokens per block of the prompt; None for the whole prompt at once.
    first: tokens of the first block, if it has another size.
    every: decoded tokens between evictions; None for no eviction while
      decoding.

  Examples:
    >>> import kvjax
    >>> print(kvjax.Schedule(block=256, every=16))
    blocks of 256, every 16 while decoding
  """

  block: int | None = None
  first: int | None = None
  every: int | None = None

  def __post_init__(self) -> None:
    for name in ("block", "first", "every"):
      size = getattr(self, name)
      if size is not None:
        check_count(name, size)
        # NumPy's integers cannot be saved.
        object.__setattr__(self, name, int(size))
    if self.first is not None and self.block is None:
      raise InputError("first is the size of the first block; give block too.")

  @property
  def is_whole_prompt(self) -> bool:
    """Whether there is only one compression, after the whole prompt."""
    return self.block is None and self.every is None

  def __str__(self) -> str:
    parts = []
    if self.block is not None:
      first = f"{self.first}, then " if self.first is not None else ""
      parts.append(f"blocks of {first}{self.block}")
    if self.every is not None:
      parts.append(f"every {self.every} while decoding")
    return ", ".join(parts) or "whole prompt"


WHOLE = Schedule()
