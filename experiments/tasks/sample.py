"""One question about one context."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvjax

GREEDY = kvjax.Sampling()

# Called with a task and the number of newly drawn samples.
OnDraw = Callable[[str, int], None]


@dataclasses.dataclass(frozen=True)
class Sample:
  """A question about a context, as generators and loaders produce it.

  `context + question + answer_prefix` is the full prompt. Context and question
  are tokenized separately, so that the context can be compressed alone.

  Attributes:
    context: the part to prefill and compress.
    question: the question after it; may be empty.
    answer_prefix: start of the model's turn; may be empty.
    answers: references.
    task: name of the task.
    max_new_tokens: maximum tokens of the answer.
    metadata: facts about the sample: length, depth, turn and so on.
    metric: the metric, one of `kvjax.experiments.metrics.registry`.
    scored_by: names of metadata that a scorer reads, recorded with the answer.
    key: what an answer should begin with, whose first token is scored too.
    chat: whether the prompt has the model's chat template.
    thinking: whether the template's thinking mode is on, if it has one.
    protected: whether no method may evict what is prefilled.
    stays: whether question and answer stay in the cache for the next sample of
      the same context.
    sampling: how tokens of the answer are drawn.
    draw: number of the answer, if answers to a prompt are drawn at random.
    seed: seed of all draws of a run.
    origin: names what it was drawn from, which its versions at other lengths
      share; None if its number among the samples of its task does.
  """

  context: str
  question: str
  answer_prefix: str
  answers: tuple[str, ...]
  task: str
  max_new_tokens: int
  metadata: Mapping[str, Any]
  metric: str = "string_match_all"
  scored_by: tuple[str, ...] = ()
  key: str | None = None
  chat: bool = True
  thinking: bool = False
  protected: bool = False
  stays: bool = False
  sampling: kvjax.Sampling = GREEDY
  draw: int | None = None
  seed: int = 0
  origin: str | None = None

  def __post_init__(self) -> None:
    """Checks names that are read once a model has answered.

    Raises:
      ValueError: `scored_by` has a name that `metadata` lacks.
    """
    lacking = [name for name in self.scored_by if name not in self.metadata]
    if lacking:
      raise ValueError(
        f"A sample of {self.task} is scored by {', '.join(lacking)}, which "
        f"its metadata lack; they have {', '.join(self.metadata) or 'nothing'}."
      )

  def with_question_in_context(self) -> "Sample":
    """Moves the question to the end of the context, to compress both."""
    return dataclasses.replace(
      self, context=self.context + self.question, question=""
    )

  @functools.cached_property
  def digest(self) -> str:
    """Identifies the sample: a hash of prompt, answers and draw."""
    texts = [self.context, self.question, self.answer_prefix, *self.answers]
    return _digest(texts + ([f"draw {self.draw}"] if self.draw else []))

  @property
  def first_draw(self) -> str:
    """The digest of the first answer that is drawn for the prompt."""
    return dataclasses.replace(self, draw=None).digest

  @property
  def draw_seed(self) -> int:
    """The seed of the answer, of 31 bits; independent of other samples."""
    return int(_digest([str(self.seed), self.digest])[:8], 16) >> 1


def _digest(texts: Sequence[str]) -> str:
  return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def in_words(sampling: kvjax.Sampling) -> str:
  """Says how answers are drawn: "greedy", or "temperature 0.6, top-p 0.95"."""
  if sampling.temperature == 0:
    return "greedy"
  nucleus = f", top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
  most = f", top-k {sampling.top_k}" if sampling.top_k else ""
  return f"temperature {sampling.temperature:g}{nucleus}{most}"


def ignore(task: str, count: int) -> None:
  """Ignores progress, as the default `OnDraw`."""
