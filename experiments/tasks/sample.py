"""One question about one context."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

# Told of a task and of how many of its samples have been drawn since.
OnDraw = Callable[[str, int], None]


@dataclasses.dataclass(frozen=True)
class Sample:
  """The record that every generator and every loader yields.

  `context + question + answer_prefix` is the whole prompt. Context and
  question are tokenised separately, so that the context alone can be
  compressed.

  Attributes:
    context: what is prefilled and compressed.
    question: what is asked afterwards; may be empty.
    answer_prefix: how the model's turn begins; may be empty.
    answers: references.
    task: its name.
    max_new_tokens: most tokens of the answer.
    metadata: what the task says about itself: length, depth, turn and so on.
    metric: how a prediction is scored, one of `kvjax.experiments.metrics`.
    chat: whether the model's chat template is put around the prompt.
    stays: whether question and answer stay in the cache of their context, for
      the sample of it that comes next.
  """

  context: str
  question: str
  answer_prefix: str
  answers: tuple[str, ...]
  task: str
  max_new_tokens: int
  metadata: Mapping[str, Any]
  metric: str = "string_match_all"
  chat: bool = True
  stays: bool = False

  @functools.cached_property
  def digest(self) -> str:
    """Tells the sample from others: hashes what is asked, and its answers."""
    asked = (self.context, self.question, self.answer_prefix, *self.answers)
    return hashlib.sha256("\0".join(asked).encode()).hexdigest()[:12]


def ignore(task: str, count: int) -> None:
  """The `OnDraw` of those who wait in silence."""
