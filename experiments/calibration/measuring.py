"""Measures the likelihood of correct answers after compression."""

import collections
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from absl import logging
from jaxtyping import Float

import kvjax
from kvjax.engine.preparing import prepare
from kvjax.engine.recitation import check_recitable
from kvjax.errors import InputError
from kvjax.experiments.calibration.answers import TokenWeights, answer_of
from kvjax.experiments.run import prefilling
from kvjax.experiments.run.batching import Context
from kvjax.experiments.run.candidates import FULL, Candidate
from kvjax.experiments.run.comparison import Work
from kvjax.experiments.run.line_files import LineFile
from kvjax.experiments.run.prompting import Prompt, Shape
from kvjax.experiments.run.results import Asked, Samples, Settings
from kvjax.experiments.run.token_counts import TokenCounts
from kvjax.hosts import read
from kvjax.models.pretrained import Pretrained
from kvjax.struct import tree_bytes

# Called with the task and the number of new measurements.
OnNew = Callable[[str, int], None]


@dataclasses.dataclass(frozen=True)
class Measurement(Asked):
  """The likelihood of an answer for one context and one compression.

  It has the fields of `Asked`.

  Attributes:
    kept_tokens: tokens kept in the layers that the budget is of, those without
      a window, mean over these and KV heads.
    nll: NLL(c) of the context, in nats per token.
    tail_nll: the same of its last tokens; see `kvjax.Features`.
    concentration: of the method's scores, likewise; None without scores.
    skewness: likewise.
    kurtosis: likewise.
    full: NLL of the correct answer given the full cache, likewise.
    kept: the same given the compressed cache.
    recited: what the compressed cache recites of the context, as
      `kvjax.recited` measures it; None if not measured.
    recited_by: digest of the weights of tokens in `recited`.
  """

  nll: float
  tail_nll: float
  concentration: float | None
  skewness: float | None
  kurtosis: float | None
  full: float
  kept: float
  recited: float | None = None
  recited_by: str | None = None

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


Measurements = LineFile[Measurement]


def stored(
  path: pathlib.Path, settings: Settings, weights: TokenWeights | None = None
) -> Measurements:
  """Opens a file of measurements, the same on all hosts.

  With weights, those that lack what is recited, or were taken with other
  weights, are left out, to be taken again.

  Raises:
    InputError: see `LineFile`.
  """
  store = Measurements(path, settings, Measurement, "measurement")
  if weights is not None:
    store.records = {
      key: measurement
      for key, measurement in store.records.items()
      if measurement.recited_by == weights.digest
    }
  logging.info("%s has %d measurements already", path, len(store.records))
  return store


def measure(
  lm: Pretrained,
  work: Work,
  store: Measurements,
  on_new: OnNew,
  weights: TokenWeights | None = None,
) -> None:
  """Takes the measurements that are missing, and adds them as they come.

  Every batch of contexts is prefilled once for all methods and budgets. Hosts
  share out the batches.

  Args:
    lm: the model.
    work: of methods and budgets without the full cache; every sample has a
      context of its own.
    store: where they are written.
    on_new: called on progress.
    weights: of tokens, to measure what caches recite; None for not.

  Raises:
    InputError: the measurements cannot be written, or a context is too long to
      be recited.
  """

  def measured(one: tuple[Shape, list[Context]]) -> Iterator[list[Measurement]]:
    began = time.monotonic()
    found = list(measure_batch(lm, work.candidates, *one, weights))
    logging.info(
      "Measured %d contexts of up to %d tokens with %d caches in %.1f s",
      *(len(one[1]), one[0].context, len(work.candidates)),
      time.monotonic() - began,
    )
    yield found

  for measurements in store.share(work.batches, measured):
    new = [each for each in measurements if each.key in work.missing]
    store.add(new)
    for task, count in collections.Counter(each.task for each in new).items():
      on_new(task, count)


def measure_batch(
  lm: Pretrained,
  chosen: Sequence[Candidate],
  shape: Shape,
  questions: Sequence[Context],
  weights: TokenWeights | None = None,
) -> Iterator[Measurement]:
  """Yields the measurements of a batch, by candidate and row; see `measure`."""
  rows = [*questions, *[questions[-1]] * (shape.rows - len(questions))]
  contexts = [one.prompts[0].context for one in rows]
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
  recited = _recited(lm, prompts, swept.caches, weights)
  likelihoods = _likelihoods(lm, swept.caches, rows, shape)
  for index, candidate in enumerate(all_candidates[1:], start=1):
    features = swept.features[index]
    assert features.tail_nll is not None
    calibrated = swept.retentions[index]
    kept = TokenCounts.of(swept.caches[index]).evictable
    for row, one in enumerate(questions):
      tokens, (sample,) = len(contexts[row]), one.samples
      share = (
        candidate.retention(tokens) if calibrated is None else calibrated[row]
      )
      yield Measurement(
        task=one.part.task,
        length=one.part.length,
        sample=one.numbers[0],
        asked=sample.digest,
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
        recited=_finite(None if recited is None else recited[index - 1], row),
        recited_by=None if weights is None else weights.digest,
      )


def _finite(values: Float[np.ndarray, " B"] | None, row: int) -> float | None:
  """Returns the value of a row; None if there is none."""
  if values is None or not np.isfinite(values[row]):
    return None
  return float(values[row])


def _recited(
  lm: Pretrained,
  prompts: kvjax.Prompts,
  caches: Sequence[kvjax.Cache],
  weights: TokenWeights | None,
) -> Float[np.ndarray, "P B"] | None:
  """Computes what all caches but the first recite, if there are weights."""
  if weights is None:
    return None
  return kvjax.recited(
    lm.model,
    lm.params,
    prefilling.asked_to_repeat(lm, prompts),
    caches[0],
    caches[1:],
    dict(weights.pairs),
  )


def _likelihoods(
  lm: Pretrained,
  caches: Sequence[kvjax.Cache],
  rows: Sequence[Context],
  shape: Shape,
) -> Float[np.ndarray, "P B"]:
  """Computes the NLL of the answers per cache, many together."""
  asked = [one.prompts[0].question for one in rows]
  questions = kvjax.Prompts.of(asked, shape.question)
  answers = kvjax.Prompts.of([answer_of(lm, *one.samples) for one in rows])
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
  lm: Pretrained,
  chosen: Sequence[Candidate],
  samples: Samples,
  weights: TokenWeights | None = None,
) -> None:
  """Rejects a method that cannot be calibrated; see `measure`.

  Raises:
    InputError: it keeps the full context at every retention, or a context is
      too long to be recited.
  """
  contexts = [
    Prompt.of_sample(lm.text, sample).context
    for drawn in samples.values()
    for sample in drawn
  ]
  prompt = kvjax.Prompts.of([max(contexts, key=len)])
  longest = int(prompt.lengths[0])
  if weights is not None:
    check_recitable(lm.model, prefilling.asked_to_repeat(lm, prompt))
  for method in dict.fromkeys(candidate.method for candidate in chosen):
    plans = [c.plan for c in chosen if c.method == method]
    kept = [prepare(plan, prompt, lm.model.geometry).counts for plan in plans]
    if all(np.all(counts >= longest) for counts in kept):
      raise InputError(
        f"--methods has {method}, which keeps all of {longest} tokens at every "
        "retention; calibrate it at a greater --length."
      )
