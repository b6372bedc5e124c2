"""Scores a model's answers to needle questions with its full cache.

Decoding is greedy. Prose comes from topics that training never saw. Context and
question are tokenized and fed separately, as in comparisons of methods.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence

import numpy as np

import kvjax
from kvjax.experiments.benchmarks.multiturn import generator
from kvjax.experiments.metrics.string_match import string_match_all
from kvjax.experiments.run import answering, prompting
from kvjax.experiments.run.candidates import FULL, candidates
from kvjax.experiments.tasks import niah, suite
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained

LENGTHS = (512, 1024, 2048)
DEPTHS = tuple(index / 9 for index in range(10))
DEPTH_TASK = "niah_single_2"
# Eight questions with their answers leave no tokens for prose in 512.
CONVERSATION_LENGTHS = (1024, 2048)
ROUNDS = 8
_ROUND_TOKENS = 16
_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Score:
  """The score of some samples at one length.

  Attributes:
    name: the task, the needle's depth or the round of a conversation.
    length: maximum tokens of prompt and answer.
    samples: number of samples.
    contained: mean share of references in the answer (`string_match_all`).
    whole: share of samples with all references in the answer.
  """

  name: str
  length: int
  samples: int
  contained: float
  whole: float

  @classmethod
  def of(cls, name: str, length: int, shares: Sequence[float]) -> "Score":
    """Computes the score from each sample's share of references."""
    whole = [share == 1 for share in shares]
    means = float(np.mean(shares)), float(np.mean(whole))
    return cls(name, length, len(shares), *means)


def validate(
  lm: Pretrained,
  samples: int,
  seed: int,
  lengths: Sequence[int] = LENGTHS,
  tasks: Sequence[str] = suite.TASKS,
) -> Iterator[Score]:
  """Scores every task at every length."""
  for length in lengths:
    drawn = {
      task: [
        suite.draw(task, number, seed, length, lm.text.count)
        for number in range(samples)
      ]
      for task in tasks
    }
    yield from _scores(lm, length, drawn)


def depth_grid(
  lm: Pretrained,
  samples: int,
  seed: int,
  lengths: Sequence[int] = LENGTHS,
  depths: Sequence[float] = DEPTHS,
) -> Iterator[Score]:
  """Scores a single needle at every depth from 0, the start, to 1, the end."""
  task = niah.TASKS[DEPTH_TASK]
  for length in lengths:
    drawn = {
      f"{100 * depth:.0f} %": [
        niah.sample(
          task,
          random.Random(f"{seed} depth {depth} {number}"),
          length,
          lm.text.count,
          depths=[depth],
        )
        for number in range(samples)
      ]
      for depth in depths
    }
    yield from _scores(lm, length, drawn)


def rounds(
  lm: Pretrained,
  samples: int,
  seed: int,
  lengths: Sequence[int] = CONVERSATION_LENGTHS,
  count: int = ROUNDS,
) -> Iterator[Score]:
  """Scores the rounds of conversations about one context.

  Questions and the model's own answers stay in the cache.
  """
  task = niah.NeedleTask(
    "niah_multiturn", "essay", key_count=count, max_new_tokens=_ROUND_TOKENS
  )
  for length in lengths:
    drawn = [
      niah.conversation(
        task,
        random.Random(f"{seed} {task.name} {number}"),
        length,
        lm.text.count,
      )
      for number in range(samples)
    ]
    said = [
      texts
      for start in range(0, samples, _ROWS)
      for texts in generate_rounds(lm, drawn[start : start + _ROWS])
    ]
    for index in range(count):
      shares = [
        string_match_all(texts[index], turns[index].answers)
        for texts, turns in zip(said, drawn, strict=True)
      ]
      yield Score.of(f"round {index + 1}", length, shares)


def generate_rounds(
  lm: Pretrained, drawn: Sequence[Sequence[Sample]]
) -> list[list[str]]:
  """Generates the answers of each round of some conversations."""
  prompts = [
    [
      prompting.Prompt.of_sample(lm.text, sample)
      for sample in generator.continued(turns, lm.text)
    ]
    for turns in drawn
  ]
  shape = prompting.Shape.of([p for row in prompts for p in row], len(prompts))
  full = candidates([FULL], [kvjax.Retention(1.0)])
  rounds = [
    [reply.text for reply in group]
    for group in answering.replies(
      lm, full, prompts, shape, answering.Seconds()
    )
  ]
  return [list(texts) for texts in zip(*rounds, strict=True)]


def _scores(
  lm: Pretrained, length: int, drawn: dict[str, list[Sample]]
) -> Iterator[Score]:
  """Yields a score per group of samples, all padded to one shape."""
  prompts = {
    name: [prompting.Prompt.of_sample(lm.text, s) for s in samples]
    for name, samples in drawn.items()
  }
  everything = [prompt for group in prompts.values() for prompt in group]
  shape = prompting.Shape.of(everything, min(_ROWS, len(everything)))
  for name, samples in drawn.items():
    texts = _answers(lm, prompts[name], shape)
    shares = [
      string_match_all(text, sample.answers)
      for text, sample in zip(texts, samples, strict=True)
    ]
    yield Score.of(name, length, shares)


def _answers(
  lm: Pretrained, prompts: Sequence[prompting.Prompt], shape: prompting.Shape
) -> Iterator[str]:
  """Generates answers from the full cache, in the order of the prompts."""
  full = candidates([FULL], [kvjax.Retention(1.0)])
  for start in range(0, len(prompts), shape.rows):
    batch = [[prompt] for prompt in prompts[start : start + shape.rows]]
    (replies,) = answering.replies(lm, full, batch, shape, answering.Seconds())
    yield from (reply.text for reply in replies)
