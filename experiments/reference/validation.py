"""How well a model answers the needle tasks with its full cache."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping

import numpy as np

import kvjax
from experiments.tasks import needles, passkey
from experiments.tasks.sample import Sample, string_match_all
from kvjax.methods import FullKV
from models.pretrained import Pretrained

LENGTHS = (1024, 2048)
_ROWS = 4

Draw = Callable[[random.Random, int, Callable[[str], int]], Sample]


def draws() -> Mapping[str, Draw]:
  """The validated tasks: RULER's NIAH and the 64-digit passkey."""

  def niah(task: needles.NeedleTask) -> Draw:
    return lambda rng, length, count: needles.sample(task, rng, length, count)

  found = {name: niah(task) for name, task in needles.TASKS.items()}
  return found | {"passkey": passkey.passkey}


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
  lm: Pretrained, samples: int, seed: int, lengths: tuple[int, ...] = LENGTHS
) -> Iterator[Score]:
  """Asks every task at every length; prose comes from held-out topics.

  Decoding is greedy and the cache is full. Context and question are tokenised
  and fed separately, as in a comparison of methods.
  """

  def count(text: str) -> int:
    return len(lm.tokenizer.encode(text))

  for length in lengths:
    for number, (name, draw) in enumerate(draws().items()):
      drawn = [
        draw(random.Random(f"{seed}/{number}/{length}/{i}"), length, count)
        for i in range(samples)
      ]
      shares = []
      for start in range(0, samples, _ROWS):
        part = drawn[start : start + _ROWS]
        texts = _answers(lm, part)
        shares += [
          string_match_all(text, sample.answers)
          for text, sample in zip(texts, part, strict=True)
        ]
      yield Score(
        name,
        length,
        samples,
        float(np.mean(shares)),
        float(np.mean([share == 1 for share in shares])),
      )


def _answers(lm: Pretrained, samples: list[Sample]) -> list[str]:
  """Greedy answers from the full cache."""
  contexts, questions = [], []
  for sample in samples:
    context, suffix = lm.tokenizer.split_chat(sample.context)
    contexts.append(lm.tokenizer.encode(context))
    questions.append(
      lm.tokenizer.encode(f"{sample.question}{suffix}{sample.answer_prefix}")
    )
  cache, _ = kvjax.prefill(
    lm.model,
    lm.params,
    kvjax.Prompts.of(contexts),
    FullKV(),
    kvjax.Retention(1.0),
  )
  decoding = kvjax.Decoding(
    max_new_tokens=samples[0].max_new_tokens, stop_ids=lm.tokenizer.eos_ids
  )
  answers = kvjax.answer(
    lm.model, lm.params, cache, kvjax.Prompts.of(questions), decoding
  )
  return [lm.tokenizer.decode(row) for row in answers.rows()]
