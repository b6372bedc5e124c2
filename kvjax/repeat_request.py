"""The request to repeat a part of a prompt."""

import dataclasses
import operator
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import InputError

_FIRST = "\n\nRepeat the previous context exactly."
_LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@runtime_checkable
class ChatTokenizer(Protocol):
  """The part of a tokenizer that a request needs."""

  def encode(self, text: str) -> list[int]:
    """Encodes a text, without adding special tokens."""
    ...

  def split_chat(self, context: str) -> tuple[str, str]:
    """Formats a chat with a context and splits it after the context."""
    ...


@dataclasses.dataclass(frozen=True)
class RepeatRequest:
  """The token ids that ask a model to repeat a part of its prompt.

  Methods that replay a prompt, such as KVzip, put them before each chunk.

  Source: Kim et al., arXiv 2505.23416 (KVzip), Section 3.2. The authors end the
  request for later chunks with a space; as in kvpress, there is none here.

  Raises InputError if one of its parts is no list of token ids.

  Attributes:
    prefix: ids of the chat template before a context. Rows may begin with them,
      or with some of them; these tokens are not replayed.
    first: ids that ask to repeat the first chunk.
    later: ids that ask to repeat another chunk, before the tokens that it
      follows.
    suffix: ids that end a question and start an answer.

  Examples:
    >>> import kvjax
    >>> request = kvjax.RepeatRequest(first=(11, 12), suffix=(2,))
    >>> prompts = kvjax.Prompts.of([[5, 6, 7]], repeat_request=request)
    >>> prompts.repeat_request.suffix
    (2,)
  """

  prefix: tuple[int, ...] = ()
  first: tuple[int, ...] = ()
  later: tuple[int, ...] = ()
  suffix: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    for name in ("prefix", "first", "later", "suffix"):
      # Lists are not hashable, and a request is part of what is compiled.
      object.__setattr__(self, name, _ids(name, getattr(self, name)))

  @property
  def asks(self) -> bool:
    """Whether there is more than the chat template before a context."""
    return bool(self.first or self.later or self.suffix)

  @classmethod
  def of(cls, tokenizer: ChatTokenizer) -> "RepeatRequest":
    """Encodes the request in English, with the chat template.

    Args:
      tokenizer: the tokenizer of a model that `kvjax.models.load` returns.

    Raises:
      InputError: the chat template refuses a single user message.
    """
    texts = tokenizer.split_chat("")
    before, after = (tuple(tokenizer.encode(text)) for text in texts)
    first, later = (tuple(tokenizer.encode(t)) for t in (_FIRST, _LATER))
    return cls(before, first, later, after)


def _ids(name: str, given: Any) -> tuple[int, ...]:
  """Token ids as a tuple; refuses what is none."""
  try:
    ids = tuple(map(operator.index, given))
  except TypeError:
    ids = (-1,)
  if any(not 0 <= number < 2**31 for number in ids):
    raise InputError(
      f"{name} of a request to repeat is a list of token ids, as in (11, 12), "
      f"not {given!r:.80}."
    )
  return ids
