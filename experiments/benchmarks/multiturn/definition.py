"""Conversations about one context, as a benchmark of `evaluate`."""

from typing import cast, override

from kvjax.errors import InputError
from kvjax.experiments.benchmarks.base import Benchmark, Drawn, Option, Request
from kvjax.experiments.benchmarks.multiturn import generator
from kvjax.experiments.run.prompting import (
  FIRST_QUERY_AWARE,
  QUERY_AGNOSTIC,
  Protocol,
)
from kvjax.models.pretrained import Pretrained

_SAMPLES = 10
_SHARED: generator.History = "shared"
_TURNS = Option(
  "turns", 8, "Questions per conversation.", lowest=1, highest=1000
)
HISTORY = Option(
  "history",
  _SHARED,
  "What a question of a conversation sees. shared: the compressed context "
  "only; conversation: also the earlier questions and their correct answers; "
  "own: the cache with the earlier questions and the model's own answers, "
  "which --every compresses again in every turn, after question and answer.",
  choices=generator.HISTORIES,
)


class Multiturn(Benchmark):
  """Several questions about one context, each about another needle."""

  name = "multiturn"
  options = (_TURNS, HISTORY)
  inputs = ("length", "essay", "words")

  @override
  def draw(self, lm: Pretrained, request: Request) -> Drawn:
    texts = request.texts()
    samples = generator.samples(
      self.lengths_of(request),
      request.value(_TURNS),
      request.samples or _SAMPLES,
      request.seed,
      lm.text,
      cast(generator.History, request.value(HISTORY)),
      request.on_draw,
      first_known=request.protocol == FIRST_QUERY_AWARE,
      essay=texts.essay,
      words=texts.key_words,
    )
    turns = str(request.value(_TURNS))
    return Drawn(samples, {"turns": turns} | texts.needle_origins)

  @override
  def total(self, request: Request) -> int:
    return len(self.lengths_of(request)) * (request.samples or _SAMPLES)

  @override
  def protocol(self, chosen: Protocol) -> Protocol:
    return chosen if chosen == QUERY_AGNOSTIC else FIRST_QUERY_AWARE

  @override
  def check(self, request: Request) -> None:
    shared = request.value(HISTORY) == _SHARED
    if request.protocol == FIRST_QUERY_AWARE and shared:
      raise InputError(
        "If the question is known, a conversation's context ends with its "
        "first question, which the others follow; choose "
        "--history=conversation or own."
      )
