"""How well a model answers the needle tasks with its full cache."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

import kvjax
from experiments import answering, suite
from experiments.candidates import FULL, candidates
from experiments.tasks.sample import Sample, string_match_all
from models.pretrained import Pretrained

LENGTHS = (1024, 2048)
_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Score:
  """Result of one task at one length.

  Attributes:
    task: name of the task.
    length: prompt and answer fit this many tokens.
    samples: how many were asked.
    contained: mean share of references in the answer (`string_match_all`).
    whole: share of samples all of whose references are in the answer.
  """

  task: str
  length: int
  samples: int
  contained: float
  whole: float


def validate(
  lm: Pretrained,
  samples: int,
  seed: int,
  lengths: Sequence[int] = LENGTHS,
  tasks: Sequence[str] = suite.TASKS,
) -> Iterator[Score]:
  """Asks every task at every length; prose comes from held-out topics.

  Decoding is greedy and the cache is full. Context and question are tokenised
  and fed separately, as in a comparison of methods.
  """

  def count(text: str) -> int:
    return len(lm.tokenizer.encode(text))

  for length in lengths:
    for task in tasks:
      drawn = [
        suite.draw(task, number, seed, length, count)
        for number in range(samples)
      ]
      shares = [
        string_match_all(text, sample.answers)
        for text, sample in zip(_answers(lm, drawn), drawn, strict=True)
      ]
      whole = [share == 1 for share in shares]
      yield Score(
        task, length, samples, float(np.mean(shares)), float(np.mean(whole))
      )


def _answers(lm: Pretrained, samples: Sequence[Sample]) -> Iterator[str]:
  """Greedy answers from the full cache, in the order of the samples."""
  full = candidates([FULL], [kvjax.Retention(1.0)])
  prompts = [
    answering.Prompt.of(
      lm.tokenizer,
      sample.context,
      sample.question,
      sample.answer_prefix,
      sample.max_new_tokens,
    )
    for sample in samples
  ]
  shape = answering.Shape.of(prompts, min(_ROWS, len(prompts)))
  for start in range(0, len(prompts), _ROWS):
    batch = prompts[start : start + _ROWS]
    (replies,) = answering.replies(lm, full, batch, shape, answering.Seconds())
    yield from (reply.text for reply in replies)
