"""LongBench's prompts (`config/dataset2prompt.json`), split for compression.

The wording is the benchmark's, including "asconcisely", which kvpress and the
papers on KV caches use as well. Context, question and start of the answer
together are the official prompt. They are split as in kvpress
(`longbench/create_huggingface_dataset.py`).
"""

import pathlib
from typing import NamedTuple

from kvjax.errors import InputError
from kvjax.files import read_json
from kvjax.models.tokenizer import Tokenizer


class PromptTexts(NamedTuple):
  """The texts of a prompt, or their templates with {context} and {input}.

  Attributes:
    context: the part that can be compressed before the question is known.
    question: the rest of the question.
    answer_prefix: start of the answer.
  """

  context: str
  question: str
  answer_prefix: str

  @property
  def full(self) -> str:
    """The official prompt."""
    return "".join(self)


PROMPTS = {
  name: PromptTexts(*texts)
  for name, texts in read_json(
    pathlib.Path(__file__).with_name("prompts.json")
  ).items()
}

# In these datasets the input ends with the start of the answer.
_ENDS_WITH_PREFIX = ("trec", "triviaqa", "samsum")


def fill(name: str, context: str, text: str) -> PromptTexts:
  """Builds the prompt of a row of a dataset.

  Args:
    name: name of the dataset, without `_e`.
    context: the row's context.
    text: the row's input.
  """
  template = PROMPTS[name]
  prompt = PromptTexts(
    template.context.format(context=context),
    template.question.format(input=text),
    template.answer_prefix,
  )
  if name not in _ENDS_WITH_PREFIX:
    return prompt
  question, label, rest = text.rpartition(prompt.answer_prefix)
  if not label or rest.strip():
    return prompt._replace(answer_prefix="")
  return prompt._replace(question=question, answer_prefix=label + rest)


def truncate(
  prompt: PromptTexts, limit: int, tokenizer: Tokenizer
) -> PromptTexts:
  """Cuts out the middle of a prompt that is longer than `limit` tokens.

  As in LongBench (`pred.py`), the first and last `limit // 2` tokens of the
  full prompt are decoded and the two texts joined. The parts of the result
  always join to that text. Question and start of the answer are at the end, so
  they remain complete unless they exceed half the limit; then the question
  loses its middle or beginning, as in LongBench. Special tokens do not count.

  Raises:
    InputError: half the limit is too short for the start of the answer.
  """
  ids = tokenizer.encode(prompt.full)
  if len(ids) <= limit:
    return prompt
  half = limit // 2
  head = tokenizer.decode(ids[:half])
  tail = tokenizer.decode(ids[len(ids) - half :])
  context, question, prefix = prompt
  # A tokenizer may normalize its input.
  ending = tokenizer.decode(tokenizer.encode(question + prefix))
  if tail.endswith(ending):
    return PromptTexts(head + tail.removesuffix(ending), question, prefix)
  if not tail.endswith(prefix):
    raise InputError(
      f"A limit of {limit} tokens is too short for a prompt of LongBench; "
      "1000 and more are usual."
    )
  cut_question = head[len(context) :] + tail.removesuffix(prefix)
  return PromptTexts(head[: len(context)], cut_question, prefix)
