"""What analyses are given, and what they find."""

import types
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from matplotlib.figure import Figure

from kvjax.experiments.reporting.formats import Table
from kvjax.experiments.reporting.wording import count
from kvjax.models.pretrained import Pretrained

# As the paper did, or so that a small model on generated data can follow.
Scale = Literal["paper", "small"]

_NONE: Mapping[str, Figure] = types.MappingProxyType({})


class Subject(NamedTuple):
  """What is looked at.

  Attributes:
    lm: the model.
    prompts: tokens of each, with its question, by task.
    lengths: of what is drawn at random, in tokens.
    scale: whether budgets are the paper's.
    seed: of all draws.
  """

  lm: Pretrained
  prompts: Mapping[str, Sequence[Sequence[int]]]
  lengths: Sequence[int]
  scale: Scale
  seed: int

  @property
  def rows(self) -> list[Sequence[int]]:
    """The prompts of all tasks."""
    return [row for rows in self.prompts.values() for row in rows]

  @property
  def described(self) -> str:
    """How many prompts there are, and of how many tokens."""
    lengths = [len(row) for row in self.rows]
    span = dict.fromkeys((min(lengths), max(lengths)))
    tokens = " to ".join(f"{length:,}" for length in span)
    return f"{count(len(lengths), 'prompt')} of {tokens} tokens"


class Findings(NamedTuple):
  """What was found.

  Attributes:
    tables: to be shown.
    notes: what a reader must know, a sentence each.
    pictures: by the names of their files.
  """

  tables: Sequence[Table]
  notes: Sequence[str] = ()
  pictures: Mapping[str, Figure] = _NONE
