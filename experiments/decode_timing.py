"""What a token takes to decode, by what is kept and by what is read."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
import rich.console
import rich.progress

import kvjax
from kvjax.experiments import kernel_timing, prefilling
from kvjax.experiments.candidates import Candidate
from kvjax.experiments.kernel_timing import Copies
from kvjax.models.pretrained import Pretrained
from kvjax.struct import tree_bytes


class Decoded(NamedTuple):
  """Decoding from a candidate's cache.

  Attributes:
    candidate: whose cache.
    cache_bytes: allocated, of all rows.
    read_tokens: that a token attends to, mean over rows, layers and KV heads.
    least_bytes: that a step must move: weights, and keys and values that are
      read, of all rows.
    seconds: of a step, a token of every row, in each round.
  """

  candidate: Candidate
  cache_bytes: int
  read_tokens: float
  least_bytes: float
  seconds: Sequence[float]

  @property
  def step(self) -> float:
    """Seconds of the median round."""
    return statistics.median(self.seconds)


def measure(
  lm: Pretrained,
  chosen: Sequence[Candidate],
  contexts: kvjax.Prompts,
  tokens: int,
  rounds: int,
) -> tuple[Copies, list[Decoded]]:
  """Decodes from every candidate's cache, by turns, and copies beside it.

  Args:
    lm: the model.
    chosen: methods and budgets.
    contexts: what is prefilled; as many rows decode together.
    tokens: that every row decodes in a round; none ends before.
    rounds: how often each is timed, after it has been compiled.
  """
  console = rich.console.Console(stderr=True)
  with console.status("prefilling"):
    found = prefilling.prefilled(lm, [c.plan for c in chosen], contexts)
    jax.block_until_ready(found)
  decoding = kvjax.Decoding(tokens)

  def decode(one: prefilling.Prefilled) -> float:
    began = time.perf_counter()
    jax.block_until_ready(
      kvjax.generate(lm.model, lm.params, one.cache, one.logits, decoding)
    )
    return time.perf_counter() - began

  for one in rich.progress.track(found, "compiling", console=console):
    decode(one)
  copy = kernel_timing.copies(kernel_timing.COPIED)
  turns = rich.progress.track(range(rounds), "timing", console=console)
  seconds = [(copy(), *map(decode, found)) for _ in turns]
  copied, *taken = zip(*seconds, strict=True)
  return Copies(2 * kernel_timing.COPIED, copied), [
    Decoded(
      candidate,
      one.cache.nbytes,
      float(np.mean(one.cache.num_attended)),
      tree_bytes(lm.params) + _read_bytes(lm, one.cache),
      [each / tokens for each in own],
    )
    for candidate, one, own in zip(chosen, found, taken, strict=True)
  ]


def table(
  copies: Copies, found: Sequence[Decoded], rows: int
) -> Iterator[tuple[str, ...]]:
  """Cells of a table, its heading first; the first candidate is the measure."""
  full = found[0].step
  yield (
    "method",
    "budget",
    "cache MiB",
    "reads",
    "ms a step",
    "tokens/s",
    "× full",
    "% of copies",
  )
  for one in found:
    speed = one.least_bytes / one.step
    yield (
      one.candidate.method,
      one.candidate.budget,
      f"{one.cache_bytes / rows / 2**20:,.2f}",
      f"{one.read_tokens:,.0f}",
      f"{1e3 * one.step:,.2f}",
      f"{rows / one.step:,.0f}",
      f"{full / one.step:.2f}",
      f"{100 * speed / copies.bytes_per_second:.1f}",
    )


def _read_bytes(lm: Pretrained, cache: kvjax.Cache) -> float:
  """Of keys and values of the tokens that are read, in all layers and rows."""
  dtype = jax.tree.leaves(lm.params)[0].dtype
  layer = lm.config.geometry.layers[0]
  each = (layer.key_dim + layer.value_width) * dtype.itemsize
  return float(np.sum(cache.num_attended)) * each
