"""A row of data and its fields."""

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvjax.errors import InputError

_LARGEST = 2**31 - 1
_DIGITS = re.compile("[0-9]{1,10}")


def printed_list(text: str) -> tuple[str, ...] | None:
  """Reads the items of a list that Python or NumPy has printed, as texts.

  NumPy puts no commas between them.

  Returns:
    None if it is no such list.
  """
  if not (text.startswith("[") and text.endswith("]")):
    return None
  try:
    items = ast.literal_eval(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    texts = [token.string for token in tokens if token.type == tokenize.STRING]
    # Numbers of thousands of digits, in hexadecimal, cannot be printed.
    return tuple(map(str, map(ast.literal_eval, texts) if texts else items))
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return None


class Row(NamedTuple):
  """A row of a file.

  Attributes:
    place: its location, as in "Line 3 of a.jsonl".
    fields: values by name.
    printed: whether lists and numbers are printed as texts, as in CSV.
  """

  place: str
  fields: Mapping[str, Any]
  printed: bool = False

  @classmethod
  def of(cls, place: str, value: Any) -> "Row":
    """Returns the row that a JSON value is.

    Raises:
      InputError: it is no object.
    """
    if not isinstance(value, dict):
      raise InputError(f"{place} must hold a JSON object.")
    return cls(place, value)

  def text(self, name: str) -> str:
    """Returns a text field.

    Raises:
      InputError: the field is missing or has another type.
    """
    value = self.fields.get(name)
    if not isinstance(value, str):
      raise InputError(f"{self.place} needs a text under {name!r}.")
    return value

  def filled(self, name: str) -> str:
    """Returns a text field that is not blank.

    Raises:
      InputError: the field is missing, has another type, or is blank.
    """
    value = self.text(name)
    if not value.strip():
      raise InputError(f"{self.place} has nothing under {name!r}.")
    return value

  def texts(self, name: str) -> tuple[str, ...]:
    """Returns a field with a nonempty list of texts, or a single text.

    Raises:
      InputError: the field is missing or has another type.
    """
    value = self.fields.get(name)
    if self.printed and isinstance(value, str):
      items = printed_list(value)
      value = value if items is None else list(items)
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
      raise InputError(f"{self.place} needs a list of texts under {name!r}.")
    if not all(isinstance(item, str) for item in values):
      raise InputError(f"{self.place} has under {name!r} what is no text.")
    return tuple(values)

  def number(self, name: str, least: int = 0) -> int:
    """Returns an integer field.

    Raises:
      InputError: the field is missing, has another type, or is below `least`
        or more than a count of tokens or words can be.
    """
    value = self.fields.get(name)
    if self.printed and isinstance(value, str) and _DIGITS.fullmatch(value):
      value = int(value)
    if type(value) is not int or not least <= value <= _LARGEST:
      raise InputError(
        f"{self.place} needs a whole number under {name!r}, from {least} to "
        f"{_LARGEST}."
      )
    return value
