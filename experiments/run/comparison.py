"""Runs every candidate on every sample that has no answer yet."""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from kvjax.engine.layer_budgets import check_always_kept
from kvjax.experiments.metrics import passkey, registry
from kvjax.experiments.run import multihost
from kvjax.experiments.run.answering import Reply, Seconds, replies
from kvjax.experiments.run.batching import (
  Context,
  batches_of,
  contexts_of,
  join_turns,
)
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.line_files import LineFile
from kvjax.experiments.run.measured import DIGITS
from kvjax.experiments.run.memory import rows_that_fit
from kvjax.experiments.run.prompting import (
  QUERY_AGNOSTIC,
  Prompt,
  Prompted,
  Protocol,
  Shape,
  check_context_length,
)
from kvjax.experiments.run.results import (
  Answer,
  Key,
  Results,
  Samples,
  Settings,
)
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer

# Called with the task and the number of new answers.
OnAnswers = Callable[[str, int], None]


@dataclasses.dataclass(frozen=True)
class Work:
  """What a comparison has left to do.

  Attributes:
    candidates: methods and budgets that lack answers.
    missing: keys of the answers.
    batches: contexts to prefill together, with their padded shapes.
  """

  candidates: Sequence[Candidate]
  missing: Set[Key]
  batches: Sequence[tuple[Shape, list[Context]]]

  @property
  def prompts(self) -> list[Prompted]:
    """The prompts of each context."""
    return [
      context.prompts for _, contexts in self.batches for context in contexts
    ]


def pending(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  samples: Samples,
  results: LineFile[Any],
  batch: int,
  protocol: Protocol = QUERY_AGNOSTIC,
  apart: bool = False,
) -> Work:
  """Finds the answers that `results` lacks.

  Samples of one part that have the same context are prefilled once.

  Args:
    lm: the model.
    candidates: methods and budgets.
    samples: samples of each task and length, in the order of their numbers;
      those with the same context have the same `max_new_tokens`.
    results: previous answers, or other records of the same keys.
    batch: contexts per prefill, or fewer if their caches do not fit in memory.
    protocol: whether the question is known before compression.
    apart: prefill samples with the same context apart.

  Raises:
    InputError: a sample is longer than the model's context, or protects more
      tokens than a candidate keeps.
  """
  missing = set(wanted(candidates, samples)) - results.records.keys()
  unfinished = {(k.method, k.options, k.budget) for k in missing}
  candidates = [
    c for c in candidates if (c.method, c.options, c.budget) in unfinished
  ]
  contexts = list(contexts_of(lm, samples, protocol, apart))
  check_context_length(
    lm, [prompt for c in contexts for prompt in join_turns(c.prompts)]
  )
  for context in contexts:
    _check_protected(lm, candidates, context.prompts[0], protocol)
  unanswered = {(key.part, key.asked) for key in missing}
  if contexts:
    longest = max(prompt.total for c in contexts for prompt in c.prompts)
    fitting = rows_that_fit(lm, candidates, longest, batch)
    # Hosts, whose memory may differ, must have the same batches.
    batch = min(map(int, multihost.gather(str(fitting).encode())))
  batches = list(batches_of(contexts, unanswered, batch, protocol))
  return Work(candidates, missing, batches)


def _check_protected(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  prompt: Prompt,
  protocol: Protocol,
) -> None:
  if not prompt.protected:
    return
  batch = Shape.of([prompt], 1, protocol).batch([prompt])
  for candidate in candidates:
    # What adapts to a prompt is known once it has been read.
    if not candidate.plan.adapts:
      check_always_kept(candidate.plan, batch, lm.model.geometry)


def answer_all(
  lm: Pretrained,
  work: Work,
  results: Results,
  on_answers: OnAnswers,
  seconds: Seconds | None = None,
) -> None:
  """Generates the answers of `pending`, and adds them as they come.

  Args:
    lm: the model.
    work: the answers.
    results: where they are written.
    on_answers: called on progress.
    seconds: the elapsed time is added to it.

  Raises:
    InputError: the answers cannot be written.
  """
  missing = set(work.missing)
  spent = seconds or Seconds()

  def answer(batch: tuple[Shape, list[Context]]) -> Iterator[list[Answer]]:
    shape, rows = batch
    prompts = [context.prompts for context in rows]
    for group in replies(lm, work.candidates, prompts, shape, spent):
      yield [_answer(rows[reply.row], reply, lm.text) for reply in group]

  for answers in results.share(work.batches, answer):
    # Equal samples are one.
    new = {each.key: each for each in answers if each.key in missing}
    missing -= new.keys()
    results.add(list(new.values()))
    for task, count in collections.Counter(k.part.task for k in new).items():
      on_answers(task, count)


def wanted(candidates: Sequence[Candidate], samples: Samples) -> list[Key]:
  """Lists the keys of a comparison: every sample of every candidate."""
  keys = (
    Key(
      part, sample.digest, candidate.method, candidate.options, candidate.budget
    )
    for candidate in candidates
    for part, drawn in samples.items()
    for sample in drawn
  )
  return list(dict.fromkeys(keys))


def check_hosts(settings: Settings, keys: Sequence[Key]) -> None:
  """Refuses hosts whose files or versions differ.

  Raises:
    InputError: some do.
  """
  own = {k: str(v) for k, v in dataclasses.asdict(settings).items()}
  own["samples, calibrations or files of methods"] = hashlib.sha256(
    repr(keys).encode()
  ).hexdigest()
  multihost.check_same(own)


def _answer(context: Context, reply: Reply, tokenizer: Tokenizer) -> Answer:
  sample = context.samples[reply.turn]
  is_cut = len(reply.tokens) >= sample.max_new_tokens
  scores = registry.score(sample, reply.text, is_cut)
  key_token = context.prompts[reply.turn].key_token
  if key_token is not None:
    first = passkey.first_nonblank_token(tokenizer, reply.tokens)
    scores["first_key_token"] = float(first == key_token)
  return Answer(
    task=context.part.task,
    length=context.part.length,
    sample=context.numbers[reply.turn],
    asked=sample.digest,
    method=reply.candidate.method,
    options=reply.candidate.options,
    budget=reply.candidate.budget,
    **{name: getattr(reply, name) for name in DIGITS},
    question=sample.question,
    answer_prefix=sample.answer_prefix,
    answers=list(sample.answers),
    prediction=reply.text,
    first_token=reply.tokens[0] if reply.tokens else None,
    depth=sample.metadata.get("depth"),
    turn=sample.metadata.get("turn"),
    draw=sample.draw,
    first_draw=None if sample.draw is None else sample.first_draw,
    origin=sample.origin,
    scores={name: 100 * share for name, share in scores.items()},
    scored_by={name: sample.metadata[name] for name in sample.scored_by},
  )
