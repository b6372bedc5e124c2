"""When a method compresses: after the prompt, its blocks, or while decoding."""

import dataclasses

from kvjax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Schedule:
  """When a method compresses; by default once, after the whole prompt.

  With a `block` the prompt is worked through in blocks: each attends to the
  cache and to itself, joins it, and then the method evicts, so that no layer
  ever holds more than its budget and a block. Later blocks attend to what was
  left of the earlier ones. KeyDiff's paper (arXiv 2504.15364) calls this block
  prompt processing; with LagKV (arXiv 2504.04704), a first block of S + 2 L
  and blocks of L, it is the paper's chunked prefill.

  With `every` the method goes on while decoding: what is fed to the cache
  joins it, and after every so many tokens the method evicts.

  Attributes:
    block: tokens per block of the prompt; None for the whole prompt at once.
    first: tokens of the first block, where it is another size.
    every: decoded tokens between evictions; None for no eviction then.
  """

  block: int | None = None
  first: int | None = None
  every: int | None = None

  def __post_init__(self) -> None:
    for name in ("block", "first", "every"):
      size = getattr(self, name)
      if size is not None and size < 1:
        raise InputError(f"{name} must be 1 or more tokens; {size} is not.")
    if self.first is not None and self.block is None:
      raise InputError("first is the size of the first block; give block too.")

  @property
  def whole(self) -> bool:
    """True where there is one compression, after the whole prompt."""
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
