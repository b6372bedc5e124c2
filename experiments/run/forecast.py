"""Says what a run costs before it starts."""

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import rich.console
import rich.text

from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import estimate, multihost, stopwatch
from kvjax.experiments.run.answering import Seconds, replies
from kvjax.experiments.run.batching import Context
from kvjax.experiments.run.comparison import Work
from kvjax.experiments.run.memory import cache_bytes
from kvjax.experiments.run.prompting import Shape
from kvjax.models.pretrained import Pretrained

# Contexts that are timed: a whole batch of them may take minutes. Each takes
# less time in a larger batch, so what is expected is an upper bound.
_TIMED = 2


class Cost(NamedTuple):
  """What a run processes.

  Attributes:
    contexts: contexts to prefill.
    answers: answers to generate.
    context_tokens: tokens of the contexts.
    question_tokens: tokens of the questions, once for every cache.
    answer_tokens: tokens of the answers if each is as long as allowed.
  """

  contexts: int
  answers: int
  context_tokens: int
  question_tokens: int
  answer_tokens: int

  def __str__(self) -> str:
    return (
      f"{wording.count(self.contexts, 'context')} of "
      f"{wording.count(self.context_tokens, 'token')} in all, "
      f"{wording.count(self.answers, 'answer')} to questions of "
      f"{wording.count(self.question_tokens, 'token')} in all, with up to "
      f"{wording.count(self.answer_tokens, 'new token')}."
    )


def cost_of(work: Work) -> Cost:
  """Counts what is left to do."""
  prompts = [prompt for several in work.prompts for prompt in several]
  caches = len(work.candidates)
  return Cost(
    contexts=len(work.prompts),
    answers=len(work.missing),
    context_tokens=sum(len(several[0].context) for several in work.prompts),
    question_tokens=caches * sum(len(prompt.question) for prompt in prompts),
    answer_tokens=caches * sum(prompt.max_new_tokens for prompt in prompts),
  )


def estimate_of(lm: Pretrained, work: Work) -> float:
  """Estimates the seconds that takes, without running the model."""
  batches = [
    estimate.Batch(
      rows=shape.rows,
      context=shape.context,
      fed=_turns(contexts) * shape.question,
      steps=_turns(contexts) * contexts[0].prompts[0].max_new_tokens,
    )
    for shape, contexts in work.batches
  ]
  return estimate.estimate(lm, work.candidates, batches)


class Pace(NamedTuple):
  """How long batches take.

  Attributes:
    contexts: contexts of the batch that was measured.
    first: seconds of this batch, with compilation.
    again: seconds of the same batch once more.
    total: estimated seconds of all batches.
  """

  contexts: int
  first: float
  again: float
  total: float

  @classmethod
  def measure(
    cls, run: Callable[[], None], contexts: int, share: float, shapes: int
  ) -> "Pace":
    """Runs a batch twice.

    Args:
      run: runs it.
      contexts: its contexts.
      share: padded tokens of all batches, over those of this one.
      shapes: number of the shapes of batches, each of which compiles.
    """
    first, again = stopwatch.seconds(run), stopwatch.seconds(run)
    own = max(share / multihost.sharing(), 1.0)
    total = again * own + shapes * max(first - again, 0.0)
    return cls(contexts, first, again, total)

  def __str__(self) -> str:
    total = estimate.in_words(self.total, digits=2)
    return (
      f"{wording.count(self.contexts, 'context')} took {self.first:.1f} s, and "
      f"{self.again:.1f} s once programs were compiled: expect up to {total} "
      "for all on this machine. Nothing was written."
    )


class Forecast(NamedTuple):
  """What a run will cost.

  Attributes:
    cost: what it processes.
    caches: bytes of a context's cache by budget, for each group of methods
      whose caches are of equal sizes.
    pace: how long it takes; None without a batch.
  """

  cost: Cost
  caches: Table
  pace: Pace | None

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> Iterator[rich.console.RenderableType]:
    """Yields the parts."""
    yield rich.text.Text(str(self.cost))
    if self.pace is not None:
      yield self.caches
      yield rich.text.Text(str(self.pace))


def forecast(lm: Pretrained, work: Work) -> Forecast:
  """Counts what is left to do, and answers questions to some contexts twice."""
  table, pace = _caches(lm, work), None
  if work.batches:
    shape, contexts = work.batches[0]
    contexts = contexts[:_TIMED]
    shape = shape._replace(rows=min(shape.rows, _TIMED))
    prompts = [context.prompts for context in contexts]

    def answer() -> None:
      for _ in replies(lm, work.candidates, prompts, shape, Seconds()):
        pass

    share = sum(map(_size, work.batches)) / _size((shape, contexts))
    shapes = len({shape for shape, _ in work.batches})
    pace = Pace.measure(answer, len(contexts), share=share, shapes=shapes)
  return Forecast(cost_of(work), table, pace)


def _size(batch: tuple[Shape, list[Context]]) -> int:
  """Returns the padded tokens that a batch processes."""
  shape, contexts = batch
  new = contexts[0].prompts[0].max_new_tokens
  per_turn = shape.question + new
  return shape.rows * (shape.context + _turns(contexts) * per_turn)


def _turns(contexts: list[Context]) -> int:
  """Returns the questions of a batch that follow one another."""
  return max(len(context.prompts) for context in contexts)


def _caches(lm: Pretrained, work: Work) -> Table:
  """Builds a table of the bytes of a cache, for a context of mean length."""
  lengths = [len(prompts[0].context) for prompts in work.prompts]
  tokens = round(statistics.fmean(lengths)) if lengths else 0
  sizes = [cache_bytes(lm, each, tokens) for each in work.candidates]
  name, size = wording.unit(sizes)
  of_method: dict[str, list[tuple[str, str]]] = {}
  for each, own in zip(work.candidates, sizes, strict=True):
    line = (wording.budget(each.method, each.budget), f"{own / size:.1f}")
    of_method.setdefault(each.method, []).append(line)
  alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
  for method, found in of_method.items():
    alike.setdefault(tuple(found), []).append(method)
  lines = [
    [", ".join(methods), *line]
    for found, methods in alike.items()
    for line in found
  ]
  title = f"about the size of a cache, for a context of {tokens} tokens"
  return Table(title, ["method", "budget", name], lines, names=2)
