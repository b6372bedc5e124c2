"""What a benchmark is: options, samples, and how its results are shown."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from kvjax.experiments.benchmarks import repetition
from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.benchmarks.ruler.generator import Texts
from kvjax.experiments.metrics import registry
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC, Protocol
from kvjax.experiments.run.results import Samples
from kvjax.experiments.tasks.sample import OnDraw, ignore
from kvjax.models.pretrained import Pretrained

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


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked of a benchmark.

  Attributes:
    seed: seed of all samples.
    tasks: names of tasks; None: all.
    lengths: tokens of prompt and answer; None: the benchmark's default.
    samples: samples per task and length; None: the benchmark's default.
    data: file, folder, or name on the hub, of published samples.
    texts: reads the texts that samples are made of.
    protocol: whether the question is known before compression.
    options: values of the benchmark's options by name.
    on_draw: called for every sample.
  """

  seed: int = 0
  tasks: Sequence[str] | None = None
  lengths: Sequence[int] | None = None
  samples: int | None = None
  data: str | None = None
  texts: Callable[[], Texts] = Texts.read
  protocol: Protocol = QUERY_AGNOSTIC
  options: Mapping[str, Value] = MappingProxyType({})
  on_draw: OnDraw = ignore

  def value(self, option: Option, otherwise: Value = None) -> Any:
    """Returns the value of an option.

    Args:
      option: the option.
      otherwise: the benchmark's default, if the option has none.
    """
    value = self.options.get(option.name, option.default)
    return otherwise if value is None else value


class Drawn(NamedTuple):
  """The samples of a run.

  Attributes:
    samples: samples of each task and length.
    data: sources of their texts, a setting that all answers share.
    notes: one line for each omission.
    about: more facts about the samples for reports.
  """

  samples: Samples
  data: Mapping[str, str]
  notes: Sequence[str] = ()
  about: Mapping[str, str] = MappingProxyType({})

  def with_chat(self, request: Request) -> "Drawn":
    """Gives all prompts the chat template, unless the official rule applies."""
    choice = request.value(CHAT)
    drawn = self.in_chat() if choice == ALWAYS else self
    return drawn._replace(data={**self.data, "chat template": choice})

  def in_chat(self) -> "Drawn":
    """Gives all prompts the chat template."""
    samples = {
      part: [dataclasses.replace(sample, chat=True) for sample in drawn]
      for part, drawn in self.samples.items()
    }
    return self._replace(samples=samples)

  def checked(self) -> "Drawn":
    """Notes how much the prompts repeat themselves, and equal samples.

    Raises:
      InputError: a metric needs a package that is not installed.
    """
    samples = self.samples
    registry.check({s.metric for part in samples.values() for s in part})
    found = repetition.of(samples)
    notes = [*self.notes, *found.notes, *_notes_of_equals(samples)]
    about = {**self.about, **found.about}
    return self._replace(notes=notes, about=about)


def _notes_of_equals(samples: Samples) -> Iterator[str]:
  """Tells of samples that equal others, whose answers would be the same."""
  for part, drawn in samples.items():
    distinct = len({sample.digest for sample in drawn})
    if distinct < len(drawn):
      yield (
        f"Of {len(drawn)} samples of {part.task}, {distinct} are distinct; "
        "each of these counts once."
      )


@dataclasses.dataclass(frozen=True)
class Presentation:
  """How results of a benchmark are named, averaged and exported.

  Attributes:
    score: name of the main score.
    scored: what it is a share of.
    averages_of_tasks: computes means by label from scores by task.
    averages_of_lengths: formats a table's columns from scores by length.
    long_answers: whether tables have the length of answers, and the bytes that
      caches take while they are decoded.
    kvpress: columns, numbers and folders in kvpress's layout.
  """

  score: str = "score"
  scored: str = "answers found"
  averages_of_tasks: (
    Callable[[Mapping[str, float]], Mapping[str, float]] | None
  ) = None
  averages_of_lengths: (
    Callable[[Mapping[int, float]], Mapping[str, str]] | None
  ) = None
  long_answers: bool = False
  kvpress: KvpressLayout = KvpressLayout()


class Benchmark(abc.ABC):
  """A benchmark of `evaluate`, listed in `benchmarks.registry`.

  Attributes:
    name: its name, as in --benchmark=NAME.
    options: options that not all benchmarks have.
    inputs: names of the shared flags that it reads: tasks, length, data, and
      those of texts.
    tasks: names that --tasks may give.
    lengths: default lengths; empty if `draw` chooses.
    presentation: how its results are shown.
  """

  name: ClassVar[str]
  options: ClassVar[Sequence[Option]] = ()
  inputs: ClassVar[Sequence[str]] = ()
  tasks: ClassVar[Sequence[str]] = ()
  lengths: ClassVar[Sequence[int]] = (1024,)
  presentation: ClassVar[Presentation] = Presentation()

  @abc.abstractmethod
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    """Draws the samples.

    Raises:
      InputError: a length is too short for a task, or a file cannot be read.
    """

  def total(self, request: Request) -> int | None:
    """Returns how often `draw` calls `on_draw`, if it is known."""
    del request
    return None

  def check(self, request: Request) -> None:
    """Rejects a request before a model is loaded.

    Raises:
      InputError: the benchmark cannot draw what is asked for.
    """
    del request

  def protocol(self, chosen: Protocol) -> Protocol:
    """Returns the protocol by which the benchmark is run."""
    return chosen

  def lengths_of(self, request: Request) -> Sequence[int]:
    """Returns the lengths of a request, or the default."""
    return self.lengths if request.lengths is None else request.lengths
