"""Times each method and budget alone, on one prompt of each length."""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

import kvjax
from kvjax.experiments.run import prefilling
from kvjax.experiments.run.batching import contexts_of
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.line_files import Line, LineFile
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.run.prompting import Prompt, Protocol, Shape
from kvjax.experiments.run.results import Samples, Settings
from kvjax.models.pretrained import Pretrained

# What the rows of a summary show of a `Speed`.
SECONDS = ("prefill_seconds", "token_seconds")
# Decoded tokens per measurement.
_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Speed(Line):
  """The time that a method and budget takes for one prompt, alone.

  Attributes:
    length: of the prompt's `Part`.
    method: name of the method.
    options: the method with all its hyperparameters.
    budget: the budget in words.
    rounds: measurements, of which the other fields are medians.
    prefill_seconds: from the prompt to its compressed cache.
    token_seconds: of a decoded token.
  """

  length: int
  method: str
  options: str
  budget: str
  rounds: int
  prefill_seconds: float
  token_seconds: float

  @property
  def key(self) -> Hashable:
    """What the time is of."""
    return self.length, self.method, self.options, self.budget


class _Seconds(NamedTuple):
  prefill: float
  token: float


def measure(
  lm: Pretrained,
  candidates: Sequence[Candidate],
  samples: Samples,
  settings: Settings,
  folder: pathlib.Path,
  rounds: int,
) -> Mapping[Hashable, Speed]:
  """Times what `speeds.jsonl` lacks, and adds it there.

  Candidates take turns, in one more round than given, since the first compiles.

  Args:
    lm: the model.
    candidates: methods and budgets.
    samples: samples of each task; the first one of each length is timed.
    settings: the settings of the run.
    folder: folder of the run.
    rounds: measurements per candidate; 0 for what the file has.

  Returns:
    The speeds by `Speed.key`.

  Raises:
    InputError: see `LineFile`.
  """
  file = LineFile(folder / "speeds.jsonl", settings, Speed, "speed")
  lengths = dict.fromkeys(part.length for part in samples)
  missing = {
    length: [c for c in candidates if _key(length, c) not in file.records]
    for length in lengths
  }
  steps = (1 + rounds) * sum(map(len, missing.values()))
  if not rounds or not steps:
    return file.records
  with progress_bar(steps, "timing") as advance:
    for length, left in missing.items():
      prompt = _first_prompt(lm, samples, length, settings.protocol)
      shape = Shape.of([prompt], 1, settings.protocol)
      seconds: list[list[_Seconds]] = [[] for _ in left]
      for _ in range(1 + rounds):
        for candidate, measured in zip(left, seconds, strict=True):
          measured.append(_time(lm, candidate, prompt, shape))
          advance(candidate.method[:15], 1)
      file.add(
        _speed(length, candidate, measured[1:])
        for candidate, measured in zip(left, seconds, strict=True)
      )
  return file.records


def add_to(
  rows: Sequence[dict[str, Any]], speeds: Mapping[Hashable, Speed]
) -> list[dict[str, Any]]:
  """Adds to the rows of a summary the seconds that are known."""
  result = []
  for row in rows:
    key = row["length"], row["method"], row["options"], row["budget"]
    speed = speeds.get(key)
    seconds = (
      {} if speed is None else {name: getattr(speed, name) for name in SECONDS}
    )
    result.append(row | seconds)
  return result


def _first_prompt(
  lm: Pretrained, samples: Samples, length: int, protocol: Protocol
) -> Prompt:
  part = next(part for part in samples if part.length == length)
  (context,) = contexts_of(lm, {part: samples[part][:1]}, protocol)
  return context.prompts[0]


def _time(
  lm: Pretrained, candidate: Candidate, prompt: Prompt, shape: Shape
) -> _Seconds:
  tokens = prompt.context if shape.question else prompt.prefilled
  contexts = kvjax.Prompts.of([tokens], shape.context)
  began = time.monotonic()
  (result,) = jax.block_until_ready(
    prefilling.prefill_all(lm, [candidate.plan], contexts)
  )
  prefilled = time.monotonic()
  answer = kvjax.generate(
    lm.model, lm.params, result.cache, result.logits, kvjax.Decoding(_TOKENS)
  )
  jax.block_until_ready(answer.tokens)
  decoded = time.monotonic()
  return _Seconds(prefilled - began, (decoded - prefilled) / _TOKENS)


def _speed(
  length: int, candidate: Candidate, measured: Sequence[_Seconds]
) -> Speed:
  return Speed(
    length,
    candidate.method,
    candidate.options,
    candidate.budget,
    len(measured),
    statistics.median(each.prefill for each in measured),
    statistics.median(each.token for each in measured),
  )


def _key(length: int, candidate: Candidate) -> Hashable:
  return length, candidate.method, candidate.options, candidate.budget
