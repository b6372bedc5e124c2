"""What an experiment of a paper is.

Most compare methods on a benchmark and are data alone: the paper's setup, what
stands in for it where there is no such model or data, and the numbers that the
paper prints. The others name a function or a program.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from kvjax.experiments.answering import Protocol
from kvjax.experiments.paper_experiments.findings import (
  Findings,
  Scale,
  Subject,
)
from kvjax.options.budgets import Budget
from kvjax.options.schedules import WHOLE, Schedule

Benchmark = Literal["longbench", "ruler", "needle", "passkey", "multiturn"]


class Way(NamedTuple):
  """A method as `kvjax.get_plan` reads it, and its budget unless columns do."""

  method: str
  budget: Budget | None = None


class Place(NamedTuple):
  """What a column holds fixed; None for what it does not."""

  budget: Budget | None = None
  length: int | None = None
  turn: int | None = None


@dataclasses.dataclass(frozen=True)
class Line:
  """A method of a table.

  Attributes:
    name: as the paper has it.
    paper: what it is here.
    small: the same with options in tokens scaled down; None leaves it out.
  """

  name: str
  paper: Way
  small: Way | None

  def at(self, scale: Scale) -> Way | None:
    """What runs."""
    return self.paper if scale == "paper" else self.small


@dataclasses.dataclass(frozen=True)
class Column:
  """A budget, a length or a turn of a table; attributes as those of `Line`."""

  name: str
  paper: Place
  small: Place | None

  def at(self, scale: Scale) -> Place | None:
    """What runs."""
    return self.paper if scale == "paper" else self.small


@dataclasses.dataclass(frozen=True)
class Average:
  """A mean of the means of groups of tasks; one group is the plain mean.

  Attributes:
    name: what it is called.
    groups: the tasks.
    score: which score is averaged.
  """

  name: str
  groups: tuple[tuple[str, ...], ...]
  score: str = "score"

  @property
  def tasks(self) -> list[str]:
    """Those of all groups."""
    return [task for group in self.groups for task in group]


class Key(NamedTuple):
  """What a number is the number of: `what` is an average or a task."""

  line: str
  column: str
  what: str


@dataclasses.dataclass(frozen=True)
class Targets:
  """What a paper prints for one of its models, 0 to 100.

  Attributes:
    model: its name.
    numbers: as printed.
    doubts: lines whose numbers are misprints or no targets, and why.
  """

  model: str
  numbers: Mapping[Key, float]
  doubts: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Setup:
  """What is asked, and when is compressed.

  Attributes:
    benchmark: see `kvjax.experiments.evaluate`.
    tasks: of RULER or LongBench.
    lengths: tokens of prompt and answer; of LongBench's prompts the most, or
      nothing, and none is cut.
    samples: per task and length, and depth or turn; None for all of LongBench.
    depths: of needle and passkey.
    schedule: when methods evict.
  """

  benchmark: Benchmark
  tasks: tuple[str, ...]
  lengths: tuple[int, ...]
  samples: int | None
  depths: int = 10
  schedule: Schedule = WHOLE


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Methods on a benchmark, beside the paper's numbers.

  Attributes:
    name: of the folder and above the table.
    paper: the paper's setup.
    small: what stands in for it; None leaves the comparison out.
    protocol: whether the question is known when is compressed.
    lines: methods.
    columns: what they are compared at.
    averages: the paper's own; the first is its headline.
    targets: its numbers, a record per model.
    quoted: lines of the targets that do not run here.
    heads: whether each KV head decides, or each query head.
    scaling: how `small` follows from `paper`, in words.
  """

  name: str
  paper: Setup
  small: Setup | None
  protocol: Protocol
  lines: tuple[Line, ...]
  columns: tuple[Column, ...]
  averages: tuple[Average, ...]
  targets: tuple[Targets, ...] = ()
  quoted: tuple[str, ...] = ()
  heads: Literal["kv", "query"] = "kv"
  scaling: str = ""

  def setup(self, scale: Scale) -> Setup | None:
    """What runs."""
    return self.paper if scale == "paper" else self.small


@dataclasses.dataclass(frozen=True)
class Analysis:
  """A measurement that no benchmark makes.

  Attributes:
    name: of the folder.
    run: measures.
    paper: whose prompts the paper took.
    small: whose prompts stand in for them. Where there are no tasks, only the
      lengths count, and all is drawn at random.
    model: whether the model runs.
  """

  name: str
  run: Callable[[Subject], Findings]
  paper: Setup
  small: Setup
  model: bool = True

  def setup(self, scale: Scale) -> Setup:
    """Whose prompts are taken."""
    return self.paper if scale == "paper" else self.small


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of its own that makes a part of an experiment.

  Attributes:
    name: of the folder.
    module: in `experiments`.
    arguments: what it is called with, beside --output; in them {folder} is that
      of the experiment.
    takes: flags that it is called with where the user has given them, and what
      they are called there.
    needs: a flag without which it is left out, or none.
    unless: a flag with which it is left out, or none.
  """

  name: str
  module: str
  arguments: Sequence[str] = ()
  takes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  needs: str = ""
  unless: str = ""


@dataclasses.dataclass(frozen=True)
class Experiment:
  """An experiment of a paper.

  Attributes:
    id: such as E5.1.
    paper: whose.
    title: what it shows.
    models: that the paper ran.
    needs: data beside the model, or nothing.
    instead: what runs without model and data.
    minutes: that this takes on two cores, roughly.
    parts: what runs, either programs alone or none.
    claims: what the paper says in words.
    remarks: what a reader of its numbers must know.
    why_not: why it cannot be run, where it has no parts.
  """

  id: str
  paper: str
  title: str
  models: str
  needs: str
  instead: str
  minutes: int
  parts: tuple[Comparison | Analysis | Program, ...]
  claims: tuple[str, ...] = ()
  remarks: tuple[str, ...] = ()
  why_not: str = ""

  @property
  def programs(self) -> list[Program]:
    """Its parts that are programs."""
    return [part for part in self.parts if isinstance(part, Program)]
