"""A resumable folder of answers, written line by line."""

import dataclasses
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.experiments.run.line_files import Line, LineFile
from kvjax.experiments.run.prompting import QUERY_AGNOSTIC, Protocol
from kvjax.experiments.tasks.sample import Sample
from kvjax.options.schedules import WHOLE


class Part(NamedTuple):
  """The samples of one task at one length.

  Attributes:
    task: name of the task.
    length: maximum number of prompt tokens, as the benchmark counts them.
  """

  task: str
  length: int


# A sample's number is its index in its part.
Samples = Mapping[Part, Sequence[Sample]]


@dataclasses.dataclass(frozen=True)
class Settings:
  """The settings that all answers of a folder share.

  Attributes:
    model: name of the model's directory.
    weights: digest of the model's files, see `model_digest`.
    dtype: dtype of weights and computation.
    seed: seed of the samples.
    benchmark: benchmark of the samples.
    data: sources of their texts, and other choices in words.
    python: Python version, whose documentation is the prose of the samples.
    protocol: whether the question is known before compression.
    schedule: when the cache is compressed.
    heads: the heads that select tokens: each "kv head" or each "query head".
    kv_dtype: dtype of quantized keys and values; empty if not quantized.
  """

  model: str
  weights: str
  dtype: str
  seed: int
  benchmark: str = "needles"
  data: Mapping[str, str] = dataclasses.field(default_factory=dict)
  python: str = platform.python_version()
  protocol: Protocol = QUERY_AGNOSTIC
  schedule: str = str(WHOLE)
  heads: str = "kv head"
  kv_dtype: str = ""


@dataclasses.dataclass(frozen=True)
class Asked(Line):
  """One sample and one cache, with some of what `Measured` says of it.

  Attributes:
    task: name of the task.
    length: of the sample's `Part`.
    sample: number of the sample.
    asked: digest of the sample.
    method: name of the method.
    options: the method with all its hyperparameters.
    budget: the budget in words.
  """

  task: str
  length: int
  sample: int
  asked: str
  method: str
  options: str
  budget: str
  retention: float
  context_tokens: int
  kept_tokens: float

  @property
  def part(self) -> Part:
    """The part of the sample."""
    return Part(self.task, self.length)

  @property
  def key(self) -> "Key":
    """The question and cache that this is of."""
    return Key(self.part, self.asked, self.method, self.options, self.budget)


@dataclasses.dataclass(frozen=True)
class Answer(Asked):
  """One sample answered from one cache; see `Asked` and `Measured`.

  The fields are in the order of a line of the file.

  Attributes:
    question: the question.
    answer_prefix: start of the model's turn.
    answers: references.
    prediction: the model's answer.
    first_token: id of its first token; None if the answer is empty.
    depth: position of the answer in the context, 0 to 1, if it has one.
    turn: number of the question in its conversation, if it has one.
    scores: scores by the sample's metric, 0 to 100; the main one is "score".
    scored_by: what a metric needs besides prediction and references.
    draw: number of the answer, if answers are drawn at random.
    first_draw: digest of the first sample of the same prompt, likewise.
    origin: what the sample was drawn from; see `Sample`.
  """

  read_tokens: float
  cache_bytes: int
  host_bytes: int
  question: str
  answer_prefix: str
  answers: list[str]
  prediction: str
  first_token: int | None
  depth: float | None
  turn: int | None
  scores: dict[str, float]
  global_tokens: float | None = None
  scored_by: dict[str, Any] = dataclasses.field(default_factory=dict)
  draw: int | None = None
  first_draw: str | None = None
  answer_tokens: int | None = None
  decoding_bytes: int | None = None
  origin: str | None = None

  def __post_init__(self) -> None:
    if "score" not in self.scores:
      raise ValueError("'scores' has no 'score'")
    if self.context_tokens < 1:
      raise ValueError("'context_tokens' is below 1")

  @property
  def score(self) -> float:
    """The main score, 0 to 100."""
    return self.scores["score"]

  @property
  def drawn_with(self) -> str | int:
    """Identifies what was drawn together.

    These are the answers that are drawn for a prompt, a sample's versions at
    several lengths, or the turns of a conversation, which have consecutive
    numbers.
    """
    if self.first_draw is not None:
      return self.first_draw
    if self.origin is not None:
      return self.origin
    return self.sample - (self.turn or 0)


class Key(NamedTuple):
  """One question to one cache.

  Digests identify samples, since a number may belong to another sample in a run
  with more samples or other files.
  """

  part: Part
  asked: str
  method: str
  options: str
  budget: str


class Results(LineFile[Answer]):
  """The answers in `samples.jsonl` of a folder, by their keys.

  A question whose line is incomplete is answered again.
  """

  def __init__(self, folder: pathlib.Path, settings: Settings):
    """Reads the existing answers; errors are those of `LineFile`."""
    super().__init__(folder / "samples.jsonl", settings, Answer, "answer")
