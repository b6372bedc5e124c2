"""Options of benchmarks, from which `evaluate` makes its flags."""

import dataclasses

type Value = str | int | bool | None


@dataclasses.dataclass(frozen=True)
class Option:
  """An option of one or more benchmarks.

  Attributes:
    name: name of the flag.
    default: its default, whose type is that of its values.
    help: its description.
    choices: the values that it may have, if these are words.
    lowest: its least value, if it is an integer.
    highest: its greatest value, if it is an integer.
  """

  name: str
  default: Value
  help: str
  choices: tuple[str, ...] = ()
  lowest: int | None = None
  highest: int | None = None


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
