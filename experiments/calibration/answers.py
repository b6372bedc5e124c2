"""Correct answers, and how much their tokens count in what caches recite."""

import collections
from typing import NamedTuple

from kvjax.calibration import reciting
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.run.results import Samples
from kvjax.experiments.tasks import niah
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained


def answer_of(lm: Pretrained, sample: Sample) -> list[int]:
  """Encodes the correct answer to a sample."""
  # Of alternatives, such as those of several annotators, the first counts.
  alternatives = sample.metric == "string_match_part"
  answers = sample.answers[:1] if alternatives else sample.answers
  return lm.text.encode(f" {niah.listing(answers)}")


class TokenWeights(NamedTuple):
  """The weights of tokens in what caches recite.

  Attributes:
    pairs: token ids, ascending, and their weights.
  """

  pairs: tuple[tuple[int, float], ...]

  @classmethod
  def of(cls, lm: Pretrained, samples: Samples) -> "TokenWeights":
    """Counts how often answers consist of a token of the contexts.

    The weight of a token is the number of times that it is in the answers over
    that in the contexts, at most 1; tokens that are not in both have none.
    """
    drawn = [sample for part in samples.values() for sample in part]
    in_answers = collections.Counter[int]()
    in_contexts = collections.Counter[int]()
    for sample in drawn:
      in_answers.update(answer_of(lm, sample))
      in_contexts.update(Prompt.of_sample(lm.text, sample).context)
    return cls(
      tuple(
        (token, min(1.0, in_answers[token] / in_contexts[token]))
        for token in sorted(in_answers.keys() & in_contexts.keys())
      )
    )

  @property
  def digest(self) -> str:
    """Tells these weights from others."""
    return reciting.digest(self.pairs)
