"""Batches of samples: one prefill, every candidate's cache, all answers."""

import dataclasses
import functools
import re
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

import kvjax
from experiments.candidates import Candidate
from experiments.results import Answer
from experiments.tasks.sample import Sample, string_match_all
from models.pretrained import Pretrained
from models.tokenizer import Tokenizer

# Rows are padded to multiples of this, so that seeds share compiled programs.
_WIDTH = 32


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A sample as token ids; the two parts are encoded apart.

  Attributes:
    context: what is prefilled and compressed.
    question: what follows: question, end of turn, start of the answer.
  """

  context: list[int]
  question: list[int]

  @classmethod
  def of(
    cls, tokenizer: Tokenizer, context: str, question: str, prefix: str = ""
  ) -> "Prompt":
    """Encodes a context and a question in the model's own chat form."""
    before, after = tokenizer.split_chat(context)
    return cls(
      tokenizer.encode(before), tokenizer.encode(question + after + prefix)
    )


@dataclasses.dataclass
class Seconds:
  """Where the time went, compilation included.

  Attributes:
    prefill: forward passes over contexts, with all scores and selections.
    answer: questions and decoding.
  """

  prefill: float = 0.0
  answer: float = 0.0


class Reply(NamedTuple):
  """What one candidate's cache makes the model say about one context.

  Attributes:
    candidate: whose cache.
    row: of the batch.
    kept_tokens: tokens kept, mean over layers and KV heads.
    cache_bytes: allocated for the row.
    text: the answer.
  """

  candidate: Candidate
  row: int
  kept_tokens: float
  cache_bytes: int
  text: str
