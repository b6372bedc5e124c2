"""Every candidate on every sample; what is already answered is not asked."""

import re
from collections.abc import Callable, Mapping, Sequence

from experiments.answering import (
  QUERY_AGNOSTIC,
  Prompt,
  Protocol,
  Reply,
  Seconds,
  Shape,
  check_room,
  replies,
)
from experiments.candidates import Candidate
from experiments.results import Answer, Key, Results
from experiments.tasks.sample import Sample, string_match_all
from models.pretrained import Pretrained

# Told of the task and of the number of answers that are new.
OnAnswers = Callable[[str, int], None]
Samples = Mapping[str, Sequence[Sample]]


def compare(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  samples: Samples,
  results: Results,
  batch: int,
  on_answers: OnAnswers,
  protocol: Protocol = QUERY_AGNOSTIC,
) -> Seconds:
  """Answers what `results` does not hold yet, and adds it there.

  Args:
    lm: the model.
    candidates: methods and budgets.
    samples: of each task, in the order of their numbers.
    results: old answers; new ones are written as they come.
    batch: samples per prefill.
    on_answers: told of progress.
    protocol: whether the question is known before anything is compressed.

  Returns:
    The time spent.

  Raises:
    InputError: a sample is longer than the model's context.
  """
  missing = set(wanted(candidates, samples)) - results.answers.keys()
  unfinished = {(key.method, key.budget) for key in missing}
  candidates = [c for c in candidates if (c.method, c.budget) in unfinished]
  prompts = {
    task: [Prompt.of_sample(lm.tokenizer, sample) for sample in drawn]
    for task, drawn in samples.items()
  }
  everything = [prompt for rows in prompts.values() for prompt in rows]
  check_room(lm, everything)
  shape = Shape.of(everything, batch, protocol)
  seconds = Seconds()
  for task, drawn in samples.items():
    numbers = sorted({key.sample for key in missing if key.task == task})
    for start in range(0, len(numbers), batch):
      chosen = numbers[start : start + batch]
      rows = [prompts[task][number] for number in chosen]
      for group in replies(lm, candidates, rows, shape, seconds):
        answers = [
          _answer(drawn[chosen[reply.row]], chosen[reply.row], reply, rows)
          for reply in group
        ]
        new = [answer for answer in answers if answer.key in missing]
        results.add(new)
        on_answers(task, len(new))
  return seconds


def wanted(candidates: Sequence[Candidate], samples: Samples) -> list[Key]:
  """What a comparison asks: every sample of every candidate."""
  return [
    Key(task, number, candidate.method, candidate.options, candidate.budget)
    for candidate in candidates
    for task, drawn in samples.items()
    for number in range(len(drawn))
  ]


def clean(prediction: str) -> str:
  """RULER's clean-up: control characters become line breaks."""
  return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def _answer(
  sample: Sample, number: int, reply: Reply, rows: Sequence[Prompt]
) -> Answer:
  prediction = clean(reply.text)
  return Answer(
    task=sample.task,
    sample=number,
    method=reply.candidate.method,
    options=reply.candidate.options,
    budget=reply.candidate.budget,
    retention=reply.retention,
    context_tokens=reply.context_tokens,
    kept_tokens=reply.kept_tokens,
    read_tokens=reply.read_tokens,
    cache_bytes=reply.cache_bytes,
    host_bytes=reply.host_bytes,
    answers=list(sample.answers),
    prediction=prediction,
    score=100 * string_match_all(prediction, sample.answers),
  )
