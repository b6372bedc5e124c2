"""Text of an answer's tokens, one after another."""

from collections.abc import Callable, Sequence

# What a decoder of bytes shows for the first half of a character.
_INCOMPLETE = "\ufffd"


class TextStream:
  """Decodes the tokens of an answer as they come, each a few times.

  `tokenizers.decoders.DecodeStream` raises where the bytes of an answer are no
  text; this does not.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
    """Starts before the first token.

    Args:
      decode: decodes tokens, such as `Tokenizer.decode`.
    """
    self._decode = decode
    self._ids: list[int] = []
    # The text of a token depends on the token before it: text is known up to
    # `_read`, from `_before` on.
    self._before, self._read = 0, 0

  def step(self, token: int) -> str:
    """Returns the text that a token completes.

    It is empty as long as bytes of a character are missing; `rest` has them.
    """
    self._ids.append(int(token))
    text = self.rest()
    if not text or text.endswith(_INCOMPLETE):
      return ""
    self._before, self._read = self._read, len(self._ids)
    return text

  def rest(self) -> str:
    """Returns the text after what `step` has returned, complete or not."""
    known = self._decode(self._ids[self._before : self._read])
    text = self._decode(self._ids[self._before :])
    # A special token has no text, so the next one begins where it did.
    return text[len(known) :]
