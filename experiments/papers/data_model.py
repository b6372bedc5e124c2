"""The data model of a paper's experiments.

Most experiments compare methods on a benchmark and are pure data: the paper's
setup, a substitute without its model or data, and the paper's numbers. The
others refer to a function or a program.
"""

import dataclasses
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from kvjax.experiments.papers.findings import Findings, Scale, Subject
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.prompting import QUERY_AWARE, Protocol
from kvjax.options.budgets import Budget
from kvjax.options.schedules import WHOLE, Schedule

# Benchmarks whose samples are the user's files.
FROM_FILES: Collection[str] = ("longbench", "math500")


class Way(NamedTuple):
  """A method name for `kvjax.get_plan`, and a budget unless columns have it."""

  method: str
  budget: Budget | None = None


class Place(NamedTuple):
  """The values that a column fixes; None for those that it does not."""

  budget: Budget | None = None
  length: int | None = None
  turn: int | None = None


class _Scaled[Paper, Small]:
  """Something that has a version for each scale."""

  paper: Paper
  small: Small

  def at(self, scale: Scale) -> Paper | Small:
    """Returns the version for a scale."""
    return self.paper if scale == "paper" else self.small


@dataclasses.dataclass(frozen=True)
class Line(_Scaled[Way, Way | None]):
  """A method of a table.

  Attributes:
    name: the name in the paper.
    paper: the method here.
    small: the same with options in tokens scaled down; None leaves it out.
  """

  name: str
  paper: Way
  small: Way | None


@dataclasses.dataclass(frozen=True)
class Column(_Scaled[Place, Place | None]):
  """A budget, a length or a turn of a table; attributes as those of `Line`."""

  name: str
  paper: Place
  small: Place | None


@dataclasses.dataclass(frozen=True)
class Average:
  """A mean of the means of groups of tasks; one group is the plain mean.

  Attributes:
    name: the name.
    groups: the tasks of each group.
    score: the score to average.
  """

  name: str
  groups: tuple[tuple[str, ...], ...]
  score: str = "score"

  @property
  def tasks(self) -> list[str]:
    """The tasks of all groups."""
    return [task for group in self.groups for task in group]

  @property
  def weights(self) -> dict[str, float]:
    """The weight of each task, with a sum of 1."""
    weights = dict.fromkeys(self.tasks, 0.0)
    for group in self.groups:
      for task in group:
        weights[task] += 1 / len(group) / len(self.groups)
    return weights

  def over(self, tasks: Collection[str]) -> "Average":
    """Restricts the groups to some tasks; empty groups are dropped."""
    groups = (tuple(t for t in group if t in tasks) for group in self.groups)
    return dataclasses.replace(self, groups=tuple(filter(None, groups)))

  def mean(self, scores: Mapping[str, float]) -> float:
    """Computes the mean of the means of the groups."""
    return statistics.fmean(
      statistics.fmean(scores[task] for task in group) for group in self.groups
    )


class Key(NamedTuple):
  """The place of a number; `what` is an average or a task."""

  line: str
  column: str
  what: str


@dataclasses.dataclass(frozen=True)
class Targets:
  """A paper's numbers for one of its models, 0 to 100.

  Attributes:
    model: name of the model.
    numbers: numbers as printed.
    doubts: lines whose numbers are misprints or no targets, with reasons.
  """

  model: str
  numbers: Mapping[Key, float]
  doubts: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Setup:
  """The samples of an experiment, and its schedule.

  Attributes:
    benchmark: name of one of `kvjax.experiments.benchmarks.registry`.
    tasks: tasks of RULER or datasets of LongBench.
    lengths: tokens of prompt and answer; for LongBench, the maximum prompt
      length, or nothing for no truncation.
    samples: samples per task and length, and depth or turn; None for all of
      LongBench.
    depths: number of depths of needle and passkey.
    schedule: when methods evict.
    in_words: for the passkey, whether lengths are words of prose instead.
    new_tokens: maximum tokens of an answer to a mathematical problem, which has
      no lengths.
  """

  benchmark: str
  tasks: tuple[str, ...]
  lengths: tuple[int, ...]
  samples: int | None
  depths: int = 10
  schedule: Schedule = WHOLE
  in_words: bool = False
  new_tokens: int | None = None


class Size(NamedTuple):
  """A quantity that candidates have.

  Attributes:
    name: its name.
    of: the quantity; None for candidates without it.
    guides: values that the paper's picture marks.
  """

  name: str
  of: Callable[[Candidate], int | None]
  guides: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Comparison(_Scaled[Setup, Setup | None]):
  """A comparison of methods on a benchmark, with the paper's numbers.

  Attributes:
    name: name of the folder and of the table.
    paper: the paper's setup.
    small: its substitute; None leaves the comparison out.
    lines: the methods.
    columns: budgets, lengths or turns to compare at.
    averages: the paper's averages; the first is its headline.
    targets: its numbers, a record per model.
    protocol: whether the question is known before compression.
    quoted: lines of the targets that do not run here.
    heads: whether each KV head selects tokens, or each query head.
    scaling: how `small` follows from `paper`, in words.
    size: a quantity of a candidate by which the headline average is also
      sorted, or None.
  """

  name: str
  paper: Setup
  small: Setup | None
  lines: tuple[Line, ...]
  columns: tuple[Column, ...]
  averages: tuple[Average, ...]
  targets: tuple[Targets, ...] = ()
  protocol: Protocol = QUERY_AWARE
  quoted: tuple[str, ...] = ()
  heads: Literal["kv", "query"] = "kv"
  scaling: str = ""
  size: Size | None = None


@dataclasses.dataclass(frozen=True)
class Analysis(_Scaled[Setup, Setup]):
  """A measurement that no benchmark covers.

  Attributes:
    name: name of the folder.
    run: the measurement.
    paper: setup of the paper's prompts.
    small: setup of substitute prompts. Without tasks, only the lengths count,
      and the data are random.
    model: whether the model runs.
  """

  name: str
  run: Callable[[Subject], Findings]
  paper: Setup
  small: Setup
  model: bool = True


@dataclasses.dataclass(frozen=True)
class Program:
  """A program that runs a part of an experiment.

  Attributes:
    name: name of the folder.
    module: module in `experiments`.
    arguments: its arguments besides --output, where {folder} stands for the
      folder of the experiment and {tau} for the paper's quality for the model.
    takes: user flags that it accepts, and their names there.
    paper: more arguments for a model of the user's.
    small: more arguments without.
    needs: flags without which it is left out.
    unless: flags with which it is left out.
  """

  name: str
  module: str
  arguments: Sequence[str] = ()
  takes: Mapping[str, str] = dataclasses.field(default_factory=dict)
  paper: Sequence[str] = ()
  small: Sequence[str] = ()
  needs: Sequence[str] = ()
  unless: Sequence[str] = ()


Part = Comparison | Analysis | Program
# Of an experiment, one or several: either all programs or none.
Parts = Mapping[str, Part | tuple[Part, ...]]


@dataclasses.dataclass(frozen=True)
class Experiment:
  """An experiment of a paper; see `experiments.toml`.

  Attributes:
    id: such as E5.1.
    paper: the paper.
    title: what it shows.
    models: the paper's models.
    needs: data besides the model, or nothing.
    instead: what runs without model and data.
    minutes: approximate time of this on two cores.
    parts: its parts, either all programs or none.
    claims: the paper's statements in words.
    remarks: facts that a reader of its numbers needs.
    why_not: why it cannot run, if it has no parts.
    recorded: what a run of ours found, and on what.
    link: where that is described, from docs/.
  """

  id: str
  paper: str
  title: str
  models: str
  needs: str = ""
  instead: str = ""
  minutes: int = 0
  parts: Sequence[Part] = ()
  claims: Sequence[str] = ()
  remarks: Sequence[str] = ()
  why_not: str = ""
  recorded: str = ""
  link: str = ""

  @property
  def programs(self) -> list[Program]:
    """Its parts that are programs."""
    return [part for part in self.parts if isinstance(part, Program)]
