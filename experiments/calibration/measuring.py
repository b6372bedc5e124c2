"""Measures the likelihood of correct answers after compression."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float

import kvjax
from kvjax.engine.prepared import prepare
from kvjax.errors import InputError
from kvjax.experiments.run import prefilling
from kvjax.experiments.run.candidates import FULL, Candidate
from kvjax.experiments.run.comparison import wanted
from kvjax.experiments.run.line_files import Line
from kvjax.experiments.run.prompting import Prompt, Shape, check_context_length
from kvjax.experiments.run.results import Key, Part, Samples
from kvjax.experiments.run.shared_lines import SharedLines
from kvjax.experiments.run.token_counts import TokenCounts
from kvjax.experiments.tasks import niah
from kvjax.experiments.tasks.sample import Sample
from kvjax.hosts import read
from kvjax.models.pretrained import Pretrained
from kvjax.struct import tree_bytes

# Called with the task and the number of new measurements.
OnNew = Callable[[str, int], None]


@dataclasses.dataclass(frozen=True)
class Measurement(Line):
  """The likelihood of an answer for one context and one compression.

  Attributes:
    task: name of the task.
    length: of the sample's `Part`.
    sample: number of the sample.
    asked: digest of the sample.
    method: name of the method.
    options: the method with all its hyperparameters.
    budget: the budget in words.
    retention: share of the context that the budget allows.
    context_tokens: tokens of the context.
    kept_tokens: tokens kept in the layers that the budget is of, those without
      a window, mean over these and KV heads.
    nll: NLL(c) of the context, in nats per token.
    tail_nll: the same of its last tokens; see `kvjax.Features`.
    concentration: of the method's scores, likewise; None without scores.
    skewness: likewise.
    kurtosis: likewise.
    full: NLL of the correct answer given the full cache, likewise.
    kept: the same given the compressed cache.
  """

  task: str
  length: int
  sample: int
  asked: str
  method: str
  options: str
  budget: str
  retention: float
  context_tokens: int
  kept_tokens: float
  nll: float
  tail_nll: float
  concentration: float | None
  skewness: float | None
  kurtosis: float | None
  full: float
  kept: float

  @property
  def key(self) -> Key:
    """The sample and candidate of the measurement."""
    part = Part(self.task, self.length)
    return Key(part, self.asked, self.method, self.options, self.budget)

  @property
  def nll_ratio(self) -> float:
    """The remaining quality as the paper measures it; see `kvjax.nll_ratio`."""
    full, kept = np.array([self.full]), np.array([self.kept])
    return float(kvjax.nll_ratio(full, kept)[0])

  @property
  def likelihood_ratio(self) -> float:
    """The remaining quality; see `kvjax.likelihood_ratio`."""
    full, kept = np.array([self.full]), np.array([self.kept])
    return float(kvjax.likelihood_ratio(full, kept)[0])


Measurements = SharedLines[Measurement]


def measure(
  lm: Pretrained,
  chosen: Sequence[Candidate],
  samples: Samples,
  store: Measurements,
  batch: int,
  on_new: OnNew,
) -> list[Measurement]:
  """Takes the measurements that `store` lacks and adds them.

  Every batch of contexts is prefilled once for all methods and budgets. Hosts
  share out the batches.

  Args:
    lm: the model.
    chosen: methods and budgets, without the full cache.
    samples: samples of each task and length, in the order of their numbers.
    store: previous measurements; new ones are written as they come.
    batch: contexts per prefill.
    on_new: called on progress.

  Returns:
    All requested measurements.

  Raises:
    InputError: a sample is longer than the model's context, or the
      measurements cannot be written.
  """
  work = pending(lm, chosen, samples, store, batch)

  def measured(one: Batch) -> Iterator[list[Measurement]]:
    began = time.monotonic()
    found = list(one.measure(lm, work.candidates))
    logging.info(
      "Measured %d contexts of up to %d tokens with %d caches in %.1f s",
      *(len(one.questions), one.shape.context, len(work.candidates)),
      time.monotonic() - began,
    )
    yield found

  for measurements in store.share(work.batches, measured):
    new = [each for each in measurements if each.key in work.missing]
    store.add(new)
    on_new(measurements[0].task, len(new))
  return [store.records[key] for key in wanted(chosen, samples)]


class Work(NamedTuple):
  """What is left to measure.

  Attributes:
    candidates: methods and budgets that lack measurements.
    missing: keys of the measurements.
    batches: contexts to prefill together.
  """

  candidates: Sequence[Candidate]
  missing: Set[Key]
  batches: Sequence["Batch"]

  def measure_first(self, lm: Pretrained) -> None:
    """Measures the first batch, and drops the measurements."""
    for _ in self.batches[0].measure(lm, self.candidates):
      pass


def pending(
  lm: Pretrained,
  chosen: Sequence[Candidate],
  samples: Samples,
  store: Measurements,
  batch: int,
) -> Work:
  """Finds the measurements that `store` lacks; see `measure`."""
  keys = wanted(chosen, samples)
  missing = set(keys) - store.records.keys()
  unfinished = {(key.method, key.options, key.budget) for key in missing}
  remaining = [
    c for c in chosen if (c.method, c.options, c.budget) in unfinished
  ]
  unmeasured = {(key.part, key.asked) for key in missing}
  questions = [
    Question.of(lm, part, number, sample)
    for part, drawn in samples.items()
    for number, sample in enumerate(drawn)
  ]
  check_context_length(lm, [one.prompt for one in questions])
  rows_per_batch = min(batch, max(map(len, samples.values())))
  shapes = {
    length: Shape.of(
      [one.prompt for one in questions if one.part.length == length],
      rows_per_batch,
    )
    for length in {part.length for part in samples}
  }
  batches = []
  for part in samples:
    shape = shapes[part.length]
    due = [
      one
      for one in questions
      if one.part == part and (part, one.digest) in unmeasured
    ]
    batches += [
      Batch(shape, rows) for rows in itertools.batched(due, shape.rows)
    ]
  return Work(remaining, missing, batches)


class Question(NamedTuple):
  """A sample, its prompt, and its correct answer as token ids."""

  part: Part
  number: int
  digest: str
  prompt: Prompt
  answer: list[int]

  @classmethod
  def of(
    cls, lm: Pretrained, part: Part, number: int, sample: Sample
  ) -> "Question":
    """Encodes a sample."""
    prompt = Prompt.of_sample(lm.text, sample)
    # Of alternatives, such as those of several annotators, the first counts.
    alternatives = sample.metric == "string_match_part"
    answers = sample.answers[:1] if alternatives else sample.answers
    answer = lm.text.encode(f" {niah.listing(answers)}")
    return cls(part, number, sample.digest, prompt, answer)


class Batch(NamedTuple):
  """Contexts of a task that are prefilled together.

  Attributes:
    shape: their padded shape.
    questions: at most as many as the shape has rows.
  """

  shape: Shape
  questions: Sequence[Question]

  def measure(
    self, lm: Pretrained, chosen: Sequence[Candidate]
  ) -> Iterator[Measurement]:
    """Yields the measurements, by candidate and row."""
    return _measure_batch(lm, chosen, self.questions, self.shape)


def _measure_batch(
  lm: Pretrained,
  chosen: Sequence[Candidate],
  questions: Sequence[Question],
  shape: Shape,
) -> Iterator[Measurement]:
  """Yields the measurements of a batch, by candidate and row."""
  rows = [*questions, *[questions[-1]] * (shape.rows - len(questions))]
  contexts = [one.prompt.context for one in rows]
  per_query_head = chosen[0].plan.per_query_head
  full = kvjax.get_plan(
    FULL, kvjax.Retention(1.0), per_query_head=per_query_head
  )
  all_candidates = [Candidate(FULL, full), *chosen]
  plans = [candidate.plan for candidate in all_candidates]
  prompts = kvjax.Prompts.of(contexts, shape.context)
  swept = kvjax.measured_sweep(
    lm.model, lm.params, prefilling.with_request(lm, plans, prompts), plans
  )
  likelihoods = _likelihoods(lm, swept.caches, rows, shape)
  for index, candidate in enumerate(all_candidates[1:], start=1):
    features = swept.features[index]
    assert features.tail_nll is not None
    calibrated = swept.retentions[index]
    kept = TokenCounts.of(swept.caches[index]).evictable
    for row, one in enumerate(questions):
      tokens = len(contexts[row])
      share = (
        candidate.retention(tokens) if calibrated is None else calibrated[row]
      )
      yield Measurement(
        task=one.part.task,
        length=one.part.length,
        sample=one.number,
        asked=one.digest,
        method=candidate.method,
        options=candidate.options,
        budget=candidate.budget,
        retention=float(share),
        context_tokens=tokens,
        kept_tokens=float(kept[row]),
        nll=float(features.nll[row]),
        tail_nll=float(features.tail_nll[row]),
        concentration=_finite(features.concentration, row),
        skewness=_finite(features.skewness, row),
        kurtosis=_finite(features.kurtosis, row),
        full=float(likelihoods[0][row]),
        kept=float(likelihoods[index][row]),
      )


def _finite(values: Float[np.ndarray, " B"] | None, row: int) -> float | None:
  """Returns the value of a row; None if there is none."""
  if values is None or not np.isfinite(values[row]):
    return None
  return float(values[row])


def _likelihoods(
  lm: Pretrained,
  caches: Sequence[kvjax.Cache],
  rows: Sequence[Question],
  shape: Shape,
) -> Float[np.ndarray, "P B"]:
  """Computes the NLL of the answers per cache, many together."""
  asked = [one.prompt.question for one in rows]
  questions = kvjax.Prompts.of(asked, shape.question)
  answers = kvjax.Prompts.of([one.answer for one in rows])
  measurements = np.empty((len(caches), len(rows)))
  for group in kvjax.group_caches(caches, tree_bytes(lm.params)):
    times = len(group)
    values = kvjax.answer_nll(
      lm.model,
      lm.params,
      kvjax.stack([caches[index] for index in group]),
      questions.repeat(times),
      answers.repeat(times),
    )
    measurements[group] = read(values).reshape(times, len(rows))
  return measurements


def check(
  lm: Pretrained, chosen: Sequence[Candidate], samples: Samples
) -> None:
  """Rejects a method that cannot be calibrated.

  Raises:
    InputError: it keeps the full context at every retention.
  """
  longest = max(
    len(Prompt.of_sample(lm.text, sample).context)
    for drawn in samples.values()
    for sample in drawn
  )
  prompt = kvjax.Prompts.of([[0] * longest])
  for method in dict.fromkeys(candidate.method for candidate in chosen):
    plans = [c.plan for c in chosen if c.method == method]
    kept = [prepare(plan, prompt, lm.config.geometry).counts for plan in plans]
    if all(np.all(counts >= longest) for counts in kept):
      raise InputError(
        f"--methods has {method}, which keeps all of {longest} tokens at every "
        "retention; calibrate it at a greater --length."
      )
