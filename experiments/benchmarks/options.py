"""Options of benchmarks, from which `evaluate` makes its flags."""

import dataclasses
from typing import Any

type Value = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Option:
  """An option of one or more benchmarks.

  Attributes:
    name: name of the flag.
    default: its default; None if it differs by benchmark.
    help: its description.
    kind: type of its values, if the default does not tell.
    choices: the values that it may have, if these are words.
    lowest: its least value, if it is a number.
    highest: its greatest value, if it is a number.
  """

  name: str
  default: Any
  help: str
  kind: type[str | int | float] | None = None
  choices: tuple[str, ...] = ()
  lowest: float | None = None
  highest: float | None = None

  @property
  def type(self) -> type:
    """The type of its values."""
    return self.kind or type(self.default)


# A template is what the model needs; only papers need the official rule.
ALWAYS, OFFICIAL = "always", "official"
CHAT = Option(
  "chat",
  ALWAYS,
  "Whether prompts have the chat template even if the benchmark's own code "
  "uses none.",
  choices=(ALWAYS, OFFICIAL),
)
DEPTHS = Option(
  "depths",
  10,
  "Number of depths of needle and passkey.",
  lowest=1,
  highest=1000,
)
