"""What a model is asked: prompts, their padded shapes, and protocols."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import kvjax
from kvjax.cache.sharding import context_size
from kvjax.errors import InputError
from kvjax.experiments.metrics import passkey
from kvjax.experiments.tasks.sample import GREEDY, Sample
from kvjax.models.pretrained import Pretrained
from kvjax.models.tokenizer import Tokenizer

Protocol = Literal[
  "query-agnostic", "query-aware", "query-aware-kvpress", "first-query-aware"
]
QUERY_AGNOSTIC: Protocol = "query-agnostic"
# The whole prompt is compressed, to the start of the answer.
QUERY_AWARE: Protocol = "query-aware"
# As kvpress with `query_aware`: the context ends with the question and is
# compressed; end of turn and start of the answer follow it uncompressed.
QUERY_AWARE_KVPRESS: Protocol = "query-aware-kvpress"
# For conversations: the context ends with the first question.
FIRST_QUERY_AWARE: Protocol = "first-query-aware"

# Widths are multiples of these, so that other seeds reuse the compiled shapes.
# A question is fed to the caches of all candidates, so that padding costs more.
_CONTEXT_WIDTH, _QUESTION_WIDTH = 32, 8
# Of the tokens on each device of the axis `context`, for attention's kernel on
# TPUs, where that pads by an eighth at most.
_SHARED_WIDTH, _MOST_PADDING = 256, 1 / 8


@dataclasses.dataclass(frozen=True)
class Prompt:
  """Token ids of a prompt, whose two parts are encoded separately.

  Attributes:
    context: the part to prefill and compress.
    question: the rest: question, end of turn, start of the answer.
    max_new_tokens: the maximum number of answer tokens.
    protected: see `Sample`.
    stays: see `Sample`.
    key_token: first token of the correct answer, if a metric needs it.
    sampling: how tokens of the answer are drawn.
    seed: seed of the draws.
  """

  context: list[int]
  question: list[int]
  max_new_tokens: int
  protected: bool = False
  stays: bool = False
  key_token: int | None = None
  sampling: kvjax.Sampling = GREEDY
  seed: int = 0

  @classmethod
  def of_sample(cls, tokenizer: Tokenizer, sample: Sample) -> "Prompt":
    """Encodes a sample of a task, with the chat template if it has one."""
    before, after = tokenizer.bos + sample.context, ""
    if sample.chat:
      before, after = tokenizer.split_chat(
        sample.context, thinking=sample.thinking
      )
    question = sample.question + after + sample.answer_prefix
    return cls(
      tokenizer.encode(before),
      tokenizer.encode(question),
      sample.max_new_tokens,
      sample.protected,
      sample.stays,
      None
      if sample.key is None
      else passkey.first_key_token(tokenizer, question, sample.key),
      sample.sampling,
      sample.draw_seed,
    )

  @property
  def prefilled(self) -> list[int]:
    """Context and question, to prefill them together."""
    return self.context + self.question

  @property
  def total(self) -> int:
    """Number of tokens of the prompt and the longest answer."""
    return len(self.context) + len(self.question) + self.max_new_tokens


# The prompts of one context, whose questions follow one another.
Prompted = Sequence[Prompt]


class Shape(NamedTuple):
  """The padded shape of all batches, so that programs compile once.

  Attributes:
    rows: prompts per batch.
    context: tokens to prefill.
    question: tokens to feed after compression; 0 if the question is prefilled
      with the context.
  """

  rows: int
  context: int
  question: int

  def prefilled(self, prompt: Prompt) -> list[int]:
    """What is prefilled of a prompt, before any eviction."""
    return prompt.context if self.question else prompt.prefilled

  def batch(self, prompts: Sequence[Prompt]) -> kvjax.Prompts:
    """What is prefilled of these prompts, padded, with what is protected."""
    texts = [self.prefilled(prompt) for prompt in prompts]
    masks = None
    if any(prompt.protected for prompt in prompts):
      pairs = zip(prompts, texts, strict=True)
      masks = [[prompt.protected] * len(text) for prompt, text in pairs]
    return kvjax.Prompts.of(texts, self.context, masks)

  @classmethod
  def of(
    cls,
    prompts: Sequence[Prompt],
    rows: int,
    protocol: Protocol = QUERY_AGNOSTIC,
  ) -> "Shape":
    """Returns the smallest shape that fits all prompts.

    The axis `context` of the mesh divides its tokens.
    """
    if protocol == QUERY_AWARE:
      both = max(len(prompt.prefilled) for prompt in prompts)
      return cls(rows, padded(both, context_size()), 0)
    contexts = max(len(prompt.context) for prompt in prompts)
    questions = max(len(prompt.question) for prompt in prompts)
    width = padded(contexts, context_size())
    return cls(rows, width, _round_up(questions, _QUESTION_WIDTH))


def check_context_length(lm: Pretrained, prompts: Sequence[Prompt]) -> None:
  """Rejects prompts that are longer than the model's context.

  Raises:
    InputError: prompt and answer together do not fit.
  """
  limit = lm.model.geometry.max_positions
  longest = max(prompts, key=lambda prompt: prompt.total)
  if longest.total > limit:
    raise InputError(
      f"Context ({len(longest.context)} tokens), question "
      f"({len(longest.question)}) and answer (up to {longest.max_new_tokens}) "
      f"come to {longest.total} tokens; the context of this model is {limit}."
    )


def padded(tokens: int, devices: int) -> int:
  """Rounds the tokens of a context up, for all devices that share them out.

  Args:
    tokens: tokens of the longest context of a batch.
    devices: size of the axis `context` of the mesh.
  """
  if devices > 1:
    wide = _round_up(tokens, devices * _SHARED_WIDTH)
    if wide - tokens <= _MOST_PADDING * tokens:
      return wide
  return _round_up(tokens, math.lcm(devices, _CONTEXT_WIDTH))


def _round_up(length: int, width: int) -> int:
  return -(-length // width) * width
