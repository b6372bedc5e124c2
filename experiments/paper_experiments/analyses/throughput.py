"""E4.5: decoding throughput by batch size."""

import time

import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.experiments.paper_experiments.findings import Findings, Subject
from kvjax.experiments.reporting.formats import Table
from kvjax.models.pretrained import Pretrained

_STEPS, _ROUNDS = 16, 3
_BATCHES = (1, 2, 4, 8)
_FULL = "full"


def measure(subject: Subject) -> Findings:
  """Measures tokens per second of dense attention and CTkvr, and the ratio."""
  reads = kvjax.Tokens(512 if subject.scale == "paper" else 32)
  plans = {
    _FULL: kvjax.get_plan(_FULL, kvjax.Retention(1.0)),
    "ctkvr": kvjax.get_plan("ctkvr", reads),
    "ctkvr:rerank=false": kvjax.get_plan("ctkvr:rerank=false", reads),
  }
  (length,) = subject.lengths
  rng = np.random.default_rng(subject.seed)
  words = subject.lm.text.encode("The sky is blue and the grass is green.")
  lines = []
  for batch in _BATCHES:
    rows = rng.choice(words, (batch, length - _STEPS)).tolist()
    prompts = kvjax.Prompts.of(rows)
    caches, logits = kvjax.sweep(
      subject.lm.model, subject.lm.params, prompts, list(plans.values())
    )
    rates = {
      name: batch * _STEPS / _seconds(subject.lm, cache, logits)
      for name, cache in zip(plans, caches, strict=True)
    }
    lines += [
      [
        str(batch),
        name,
        f"{rate:,.0f}",
        f"{rate / rates[_FULL]:.2f}",
        f"{cache.nbytes / 2**20:.1f}",
      ]
      for (name, rate), cache in zip(rates.items(), caches, strict=True)
    ]
  title = f"prompts of {length:,} tokens, {_STEPS} decoded, {reads} retrieved"
  header = ["batch", "method", "tokens/s", "× full", "MiB"]
  return Findings([Table(title, header, lines, names=2)])


def _seconds(
  lm: Pretrained, cache: kvjax.Cache, logits: Float[Array, "B V"]
) -> float:
  """Measures the minimum time of several decodings, after compilation."""
  decoding = kvjax.Decoding(_STEPS)
  seconds = []
  for _ in range(1 + _ROUNDS):
    began = time.perf_counter()
    kvjax.generate(lm.model, lm.params, cache, logits, decoding).rows()
    seconds.append(time.perf_counter() - began)
  return min(seconds[1:])
