"""Joins samples that share a context, and contexts of similar length."""

import collections
import dataclasses
import itertools
from collections.abc import Container, Hashable, Iterator, Sequence

from kvjax.experiments.run.prompting import (
  QUERY_AWARE,
  QUERY_AWARE_KVPRESS,
  Prompt,
  Prompted,
  Protocol,
  Shape,
)
from kvjax.experiments.run.results import Part, Samples
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained

# Contexts share a padded length if the shortest has this share of the longest's
# tokens, or at most this many fewer.
_SIMILAR = 0.75
_SIMILAR_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Context:
  """Samples that share a context.

  Attributes:
    part: the part of the samples.
    numbers: numbers of the samples.
    samples: the samples.
    prompts: their prompts.
  """

  part: Part
  numbers: Sequence[int]
  samples: Sequence[Sample]
  prompts: Sequence[Prompt]

  def of_samples(self, asked: Container[tuple[Part, str]]) -> "Context":
    """Leaves out samples that are not asked, unless they stay in the cache."""
    chosen = [
      index
      for index, sample in enumerate(self.samples)
      if (self.part, sample.digest) in asked
    ]
    if chosen and self.prompts[0].stays:
      return self
    return Context(
      self.part,
      [self.numbers[index] for index in chosen],
      [self.samples[index] for index in chosen],
      [self.prompts[index] for index in chosen],
    )


def contexts_of(
  lm: Pretrained, samples: Samples, protocol: Protocol, apart: bool = False
) -> Iterator[Context]:
  """Yields the contexts of each part; if `apart`, one for every sample."""
  for part, drawn in samples.items():
    groups: dict[object, list[int]] = {}
    prompted = drawn
    if protocol == QUERY_AWARE_KVPRESS:
      prompted = [sample.with_question_in_context() for sample in drawn]
    for number, sample in enumerate(prompted):
      key = number if apart or protocol == QUERY_AWARE else sample.context
      groups.setdefault(key, []).append(number)
    for numbers in groups.values():
      prompts = [Prompt.of_sample(lm.text, prompted[n]) for n in numbers]
      yield Context(part, numbers, [drawn[n] for n in numbers], prompts)


def join_turns(prompts: Prompted) -> Prompted:
  """Joins turns that stay in the cache, which must fit the context together."""
  first = prompts[0]
  if not first.stays:
    return prompts
  question = [token for prompt in prompts for token in prompt.question]
  answers = sum(prompt.max_new_tokens for prompt in prompts)
  return [Prompt(first.context, question, answers)]


def batches_of(
  contexts: Sequence[Context],
  unanswered: set[tuple[Part, str]],
  batch: int,
  protocol: Protocol,
) -> Iterator[tuple[Shape, list[Context]]]:
  """Batches contexts of one kind and similar length, with their padded shape.

  Parts whose answers have the same length and sampling share batches. Shapes
  depend on all contexts, including answered ones, so that a resumed run reuses
  its compiled programs.
  """
  shapes: dict[int, Shape] = {}
  # Nothing may follow a context that ends with its question.
  asked = [context for context in contexts if context.prompts[0].question]
  ended = [context for context in contexts if not context.prompts[0].question]
  for similar in itertools.chain(_by_length(asked), _by_length(ended)):
    kinds = collections.Counter(map(_kind, similar))
    rows = min(batch, max(kinds.values()))
    prompts = [prompt for context in similar for prompt in context.prompts]
    shape = Shape.of(prompts, rows, protocol)
    shapes |= {id(context): shape for context in similar}
  groups: dict[Hashable, tuple[Shape, list[Context]]] = {}
  for context in contexts:
    shape = shapes[id(context)]
    context = context.of_samples(unanswered)
    if context.samples:
      key = (shape, _kind(context))
      groups.setdefault(key, (shape, []))[1].append(context)
  for shape, group in groups.values():
    for start in range(0, len(group), shape.rows):
      yield shape, group[start : start + shape.rows]


def _kind(context: Context) -> Hashable:
  """What contexts of one batch have in common besides their length."""
  first = context.prompts[0]
  most = max(prompt.max_new_tokens for prompt in context.prompts)
  # Turns that stay take room in the cache, equally many in all rows.
  turns = len(context.prompts) if first.stays else 0
  return most, first.sampling, turns


def _by_length(contexts: Sequence[Context]) -> Iterator[list[Context]]:
  """Groups contexts that share a padded length, the longest first."""

  def tokens(context: Context) -> int:
    return len(context.prompts[0].context)

  left = sorted(contexts, key=tokens, reverse=True)
  while left:
    longest = tokens(left[0])
    least = min(_SIMILAR * longest, longest - _SIMILAR_TOKENS)
    yield [context for context in left if tokens(context) >= least]
    left = [context for context in left if tokens(context) < least]
