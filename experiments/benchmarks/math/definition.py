"""Mathematical problems as benchmarks of `evaluate`.

Prompts are short and answers are long, so what matters is what is evicted while
decoding: `--every` and `--budget`.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, override

import kvjax
from kvjax.errors import InputError
from kvjax.experiments.benchmarks import hub
from kvjax.experiments.benchmarks.base import (
  Benchmark,
  Drawn,
  Option,
  Presentation,
  Request,
)
from kvjax.experiments.benchmarks.kvpress_layout import KvpressLayout
from kvjax.experiments.benchmarks.math import arithmetic, problems
from kvjax.experiments.benchmarks.math.problems import Problem
from kvjax.experiments.run.digests import data_name
from kvjax.experiments.run.prompting import Prompt
from kvjax.experiments.run.results import Answer, Part
from kvjax.experiments.tasks.sample import Sample, in_words
from kvjax.models.pretrained import Pretrained

_RIGHT = 100.0


@dataclasses.dataclass(frozen=True)
class MathLayout(KvpressLayout):
  """One folder, with the numbers of answers that are given and right."""

  @override
  def data_dir(self, row: Mapping[str, Any]) -> None:
    del row

  @override
  def columns(self, answer: Answer) -> dict[str, object]:
    return {"task": answer.task, "answer": answer.answers[0]}

  @override
  def metrics(
    self, scores: Mapping[str, float], answers: Sequence[Answer]
  ) -> object:
    correct = sum(answer.score == _RIGHT for answer in answers)
    return {
      "correct": correct,
      "answered": sum(answer.scores["boxed"] > 0 for answer in answers),
      "accuracy": round(correct / max(len(answers), 1), 4),
      "total": len(answers),
    }


NEW_TOKENS = Option(
  "max_new_tokens",
  None,
  "Maximum tokens of an answer to a mathematical problem; the default is "
  "32,768 for aime25, 8,192 for math500 and 128 for arithmetic, what the file "
  "says, or less if the model's context is shorter.",
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
  None,
  "Draws among the most likely tokens that together have this probability; the "
  "default is 0.95.",
  kind=float,
  lowest=0.0,
  highest=1.0,
)
_TOP_K = Option(
  "top_k",
  None,
  "Draws among this many most likely tokens; the default is 0, for all.",
  kind=int,
  lowest=0,
)
_CHAT, _THINKING, _NO_TEMPLATE = "chat", "thinking", "none"
_TEMPLATE = Option(
  "template",
  None,
  "Whether prompts have the chat template, with its thinking mode turned on, "
  "or none; the default is chat, and none for arithmetic.",
  kind=str,
  choices=(_CHAT, _THINKING, _NO_TEMPLATE),
)
_NOTHING, _PROMPT = "nothing", "prompt"
_PROTECT = Option(
  "protect",
  _NOTHING,
  "What no method may evict: nothing, or the prompt, which without "
  "--protocol=query-aware ends with the problem.",
  choices=(_NOTHING, _PROMPT),
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
    template: default of --template.
    metadata: facts about all samples.
  """

  options: ClassVar[Sequence[Option]] = (
    NEW_TOKENS,
    _DRAWS,
    _TEMPERATURE,
    _TOP_P,
    _TOP_K,
    _TEMPLATE,
    _PROTECT,
  )
  lengths = ()
  presentation = Presentation(
    scored="answers right", long_answers=True, kvpress=MathLayout()
  )
  new_tokens: ClassVar[int]
  draws: ClassVar[int] = 1
  temperature: ClassVar[float] = 0.6
  template: ClassVar[str] = _CHAT
  metadata: ClassVar[Mapping[str, str]] = MappingProxyType({})

  def samples_of(
    self, lm: Pretrained, found: Sequence[Problem], request: Request
  ) -> list[Sample]:
    """Builds a sample for every problem and draw.

    Answers of files without a length are as long as the model's context allows
    for the longest problem.
    """
    sampling = self._sampling(request)
    template = request.value(_TEMPLATE, self.template)
    draws = range(request.value(_DRAWS, self.draws))
    samples = [
      Sample(
        context=problem.statement,
        question=problem.request,
        answer_prefix=problem.answer_prefix,
        answers=(problem.answer,),
        task=self.name,
        max_new_tokens=request.value(
          NEW_TOKENS, problem.new_tokens or self.new_tokens
        ),
        metadata=self.metadata,
        metric="math",
        chat=template != _NO_TEMPLATE,
        thinking=template == _THINKING,
        protected=request.value(_PROTECT) == _PROMPT,
        sampling=sampling,
        draw=draw if sampling.temperature else None,
        seed=request.seed,
      )
      for problem in found
      for draw in draws
    ]
    if request.value(NEW_TOKENS) is not None:
      return samples
    prompts = [Prompt.of_sample(lm.text, s) for s in samples[:: len(draws)]]
    longest = max(len(prompt.prefilled) for prompt in prompts)
    room = max(lm.model.geometry.max_positions - longest, 1)
    return [
      dataclasses.replace(s, max_new_tokens=min(s.max_new_tokens, room))
      for s in samples
    ]

  def _sampling(self, request: Request) -> kvjax.Sampling:
    """Returns how answers are drawn.

    Raises:
      InputError: an option is out of range, or has no effect.
    """
    temperature = request.value(_TEMPERATURE, self.temperature)
    if temperature != 0:
      top_p, top_k = request.value(_TOP_P, 0.95), request.value(_TOP_K, 0)
      return kvjax.Sampling(temperature, top_p, top_k)
    for option in (_TOP_P, _TOP_K):
      if request.value(option) is not None:
        raise InputError(
          f"--{option.name} needs a --temperature above 0: otherwise the most "
          "likely token is taken."
        )
    return kvjax.Sampling()

  @override
  def check(self, request: Request) -> None:
    draws = request.value(_DRAWS, self.draws)
    if draws > 1 and self._sampling(request).temperature == 0:
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
    samples = self.samples_of(lm, problems.read(path, request.samples), request)
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
  template = _NO_TEMPLATE
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
    samples = self.samples_of(lm, found, request)
    part = Part(self.name, samples[0].max_new_tokens)
    return Drawn({part: samples}, {"steps": str(steps)} | _how(samples))


def _how(samples: Sequence[Sample]) -> dict[str, str]:
  """Says how answers are drawn, which all answers of a run share."""
  first = samples[0]
  chat = _THINKING if first.thinking else _CHAT
  protected = {"protected": _PROMPT} if first.protected else {}
  return {
    "template": chat if first.chat else _NO_TEMPLATE,
    "answers": in_words(first.sampling),
    "tokens of an answer": f"at most {first.max_new_tokens}",
  } | protected
