"""Times each method and budget alone, on one prompt of each length."""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import kvjax
from kvjax.experiments.run import prefilling, stopwatch
from kvjax.experiments.run.batching import contexts_of
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.run.line_files import Line, LineFile
from kvjax.experiments.run.progress_bar import progress_bar
from kvjax.experiments.run.prompting import Prompt, Protocol, Shape
from kvjax.experiments.run.results import Samples, Settings
from kvjax.models.pretrained import Pretrained

# Least decoded tokens per measurement.
_TOKENS = 32
# Candidates that take turns. What they took is written before the next ones.
_TURNS = 10


@dataclasses.dataclass(frozen=True)
class Speed(Line):
  """The time that a method and budget takes for one prompt, alone.

  Attributes:
    device: see `environment.device`.
    length: of the prompt's `Part`.
    method: name of the method.
    options: the method with all its hyperparameters.
    budget: the budget in words.
    rounds: measurements, of which the other fields are medians.
    prefill_seconds: from the prompt to its compressed cache.
    token_seconds: of a decoded token, with its share of an eviction.
  """

  device: str
  length: int
  method: str
  options: str
  budget: str
  rounds: int
  prefill_seconds: float
  token_seconds: float

  @property
  def key(self) -> tuple[str, int, str, str, str]:
    """What the time is of."""
    return self.device, self.length, self.method, self.options, self.budget


class Speeds:
  """The times in `speeds.jsonl` of a run's folder.

  Those of other devices stay there and are not shown.
  """

  def __init__(
    self, folder: pathlib.Path, settings: Settings, device: str
  ) -> None:
    """Reads the times that are there.

    Raises:
      InputError: see `LineFile`.
    """
    self._file = LineFile(folder / "speeds.jsonl", settings, Speed, "speed")
    self._protocol = settings.protocol
    self._device = device

  def measure(
    self,
    lm: Pretrained,
    candidates: Sequence[Candidate],
    samples: Samples,
    rounds: int,
  ) -> None:
    """Adds the times that are missing, or of fewer rounds.

    Candidates take turns, in one more round than given, since the first
    compiles.

    Args:
      lm: the model.
      candidates: methods and budgets.
      samples: samples of each task; the first one of each length is timed.
      rounds: measurements per candidate.

    Raises:
      InputError: see `LineFile.add`.
    """
    missing = {
      length: [c for c in candidates if self._rounds(length, c) < rounds]
      for length in dict.fromkeys(part.length for part in samples)
    }
    steps = (1 + rounds) * sum(map(len, missing.values()))
    if not steps:
      return
    with progress_bar(steps, "timing") as advance:
      for length, left in missing.items():
        prompt = _first_prompt(lm, samples, length, self._protocol)
        shape = Shape.of([prompt], 1, self._protocol)
        for turns in itertools.batched(left, _TURNS):
          seconds: list[list[tuple[float, float]]] = [[] for _ in turns]
          for _ in range(1 + rounds):
            for candidate, measured in zip(turns, seconds, strict=True):
              measured.append(_time(lm, candidate, prompt, shape))
              advance(candidate.method, 1)
          self._file.add(
            Speed(
              *self._key(length, candidate),
              rounds,
              *map(statistics.median, zip(*measured[1:], strict=True)),
            )
            for candidate, measured in zip(turns, seconds, strict=True)
          )

  def add_to(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds what is known of this device to the rows of a summary."""

    def seconds(row: dict[str, Any]) -> dict[str, float]:
      names = ("length", "method", "options", "budget")
      key = (self._device, *(row[name] for name in names))
      speed = self._file.records.get(key)
      if speed is None:
        return {}
      return {
        "prefill_seconds": speed.prefill_seconds,
        "token_seconds": speed.token_seconds,
      }

    return [row | seconds(row) for row in rows]

  def _key(
    self, length: int, candidate: Candidate
  ) -> tuple[str, int, str, str, str]:
    method, options = candidate.method, candidate.options
    return self._device, length, method, options, candidate.budget

  def _rounds(self, length: int, candidate: Candidate) -> int:
    """Rounds that a candidate was timed in; 0 for none."""
    known = self._file.records.get(self._key(length, candidate))
    return 0 if known is None else known.rounds


def _first_prompt(
  lm: Pretrained, samples: Samples, length: int, protocol: Protocol
) -> Prompt:
  part = next(part for part in samples if part.length == length)
  (context,) = contexts_of(lm, {part: samples[part][:1]}, protocol)
  return context.prompts[0]


def _time(
  lm: Pretrained, candidate: Candidate, prompt: Prompt, shape: Shape
) -> tuple[float, float]:
  """Measures the seconds of the prefill, and of a decoded token."""
  contexts = shape.batch([prompt])
  later = candidate.plan.while_decoding
  every = None if later is None else later.schedule.every
  count = max(_TOKENS, every or 0)
  (result,), prefill = stopwatch.timed(
    lambda: prefilling.prefill_all(lm, [candidate.plan], contexts)
  )
  decoding = kvjax.Decoding(count)
  answer = stopwatch.seconds(
    lambda: kvjax.generate(
      lm.model, lm.params, result.cache, result.logits, decoding
    )
  )
  return prefill, answer / count
