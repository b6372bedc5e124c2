"""The inputs and outputs of analyses."""

import types
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import kvjax
from kvjax.experiments.report.formats import Table
from kvjax.experiments.report.wording import count
from kvjax.models.pretrained import Pretrained

# The paper's setup, or one for a small model on generated data.
Scale = Literal["paper", "small"]


class Subject(NamedTuple):
  """The input of an analysis.

  Attributes:
    lm: the model.
    prompts: tokens of each prompt, with its question, by task.
    lengths: lengths of random data in tokens.
    scale: whether budgets are the paper's.
    seed: random seed.
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
    """The number of prompts and their lengths, in words."""
    lengths = [len(row) for row in self.rows]
    span = dict.fromkeys((min(lengths), max(lengths)))
    tokens = " to ".join(f"{length:,}" for length in span)
    return f"{count(len(lengths), 'prompt')} of {tokens} tokens"

  def random_prose(self, rows: int, length: int) -> kvjax.Prompts:
    """Draws prompts of words; more rows begin with the same ones."""
    words = self.lm.text.encode("The sky is blue and the grass is green.")
    drawn = np.random.default_rng(self.seed).choice(words, (rows, length))
    return kvjax.Prompts.of(drawn.tolist())


class Findings(NamedTuple):
  """The output of an analysis.

  Attributes:
    tables: the tables.
    notes: sentences that a reader needs.
    pictures: figures by file name.
  """

  tables: Sequence[Table]
  notes: Sequence[str] = ()
  pictures: Mapping[str, Figure] = types.MappingProxyType({})
