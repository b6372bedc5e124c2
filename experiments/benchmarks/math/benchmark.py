"""Mathematical problems as benchmarks of `evaluate`.

Prompts are short and answers are long, so what matters is what is evicted while
decoding: `--every` and `--budget`.
"""

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, override

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.math import arithmetic, problems
from kvjax.experiments.benchmarks.math.problems import Problem
from kvjax.experiments.benchmarks.options import Option
from kvjax.experiments.run.results import Part, data_name
from kvjax.experiments.tasks.sample import Sample
from kvjax.models.pretrained import Pretrained

_NEW_TOKENS = Option(
  "max_new_tokens",
  None,
  "Maximum tokens of an answer to a mathematical problem; the default is "
  "32,768 for aime25, 8,192 for math500 and 128 for arithmetic.",
  kind=int,
  lowest=1,
)
_DRAWS = Option(
  "draws",
  None,
  "Answers that are drawn for each problem; the default is 8 for aime25 and 1 "
  "for others.",
  kind=int,
  lowest=1,
  highest=1000,
)
_TEMPERATURE = Option(
  "temperature",
  None,
  "Temperature at which answers are drawn, 0 for the most likely tokens; the "
  "default is 0.6, and 0 for arithmetic.",
  kind=float,
  lowest=0.0,
)
_TOP_P = Option(
  "top_p",
  0.95,
  "Draws among the most likely tokens that together have this probability.",
  lowest=0.0,
  highest=1.0,
)
_TOP_K = Option(
  "top_k",
  0,
  "Draws among this many most likely tokens; 0 for all.",
  lowest=0,
)
_STEPS = Option(
  "steps", 2, "Changes in a problem of arithmetic.", lowest=1, highest=1000
)


class _Problems(Benchmark):
  """Problems whose answers are numbers or formulas.

  Attributes:
    new_tokens: default of --max_new_tokens.
    draws: default of --draws.
    temperature: default of --temperature.
    chat: whether prompts have the chat template.
    metadata: facts about all samples.
  """

  options: ClassVar[Sequence[Option]] = (
    _NEW_TOKENS,
    _DRAWS,
    _TEMPERATURE,
    _TOP_P,
    _TOP_K,
  )
  lengths = ()
  presentation = Presentation(scored="answers right", long_answers=True)
  new_tokens: ClassVar[int]
  draws: ClassVar[int] = 1
  temperature: ClassVar[float] = 0.6
  chat: ClassVar[bool] = True
  metadata: ClassVar[Mapping[str, str]] = MappingProxyType({})

  def samples_of(
    self, found: Sequence[Problem], request: Request
  ) -> list[Sample]:
    """Builds a sample for every problem and draw."""
    new_tokens = request.value(_NEW_TOKENS, self.new_tokens)
    temperature = request.value(_TEMPERATURE, self.temperature)
    sampling = kvjax.Sampling()
    if temperature > 0:
      top_p, top_k = request.value(_TOP_P), request.value(_TOP_K)
      sampling = kvjax.Sampling(temperature, top_p, top_k)
    draws = request.value(_DRAWS, self.draws)
    return [
      Sample(
        context=problem.statement,
        question=problem.request,
        answer_prefix=problem.answer_prefix,
        answers=(problem.answer,),
        task=self.name,
        max_new_tokens=new_tokens,
        metadata=self.metadata,
        metric="math",
        chat=self.chat,
        sampling=sampling,
        draw=draw if draws > 1 else None,
      )
      for problem in found
      for draw in range(draws)
    ]

  @override
  def check(self, request: Request) -> None:
    draws = request.value(_DRAWS, self.draws)
    if draws > 1 and request.value(_TEMPERATURE, self.temperature) == 0:
      raise InputError(
        f"--draws={draws} needs a --temperature above 0: the most likely "
        "tokens are always the same."
      )


class _Published(_Problems):
  """A published set of problems, from the user's files."""

  inputs = ("data",)

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    path = hub.resolve(request.data or "")
    samples = self.samples_of(problems.read(path, request.samples), request)
    part = Part(self.name, samples[0].max_new_tokens)
    return Drawn({part: samples}, {"files": data_name(path)} | _how(samples))

  @override
  def check(self, request: Request) -> None:
    super().check(request)
    if request.data is None:
      raise InputError(
        f"{self.name} is read from disk; give its file by --data, or its name "
        "on the Hugging Face hub."
      )


class Math500(_Published):
  """MATH-500 (Hendrycks et al. 2021; Lightman et al. 2023)."""

  name = "math500"
  new_tokens = 8192


class Aime25(_Published):
  """The 30 problems of AIME 2025."""

  name = "aime25"
  new_tokens = 32_768
  draws = 8


class Arithmetic(_Problems):
  """Chains of additions and subtractions, generated."""

  name = "arithmetic"
  options: ClassVar[Sequence[Option]] = (*_Problems.options, _STEPS)
  new_tokens = 128
  temperature = 0.0
  chat = False
  metadata = MappingProxyType({"until": arithmetic.END})

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    steps = request.value(_STEPS)
    found = [
      arithmetic.problem(
        random.Random(f"{request.seed} {self.name} {steps} {number}"), steps
      )
      for number in range(request.samples or 20)
    ]
    samples = self.samples_of(found, request)
    part = Part(self.name, samples[0].max_new_tokens)
    return Drawn({part: samples}, {"steps": str(steps)} | _how(samples))


def _how(samples: Sequence[Sample]) -> dict[str, str]:
  """Says how answers are drawn, which all answers of a run share."""
  first = samples[0]
  return {
    "sampling": str(first.sampling),
    "most tokens": str(first.max_new_tokens),
  }
