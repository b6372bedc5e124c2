"""Times decoding from caches of several sizes."""

import functools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

import kvjax
from kvjax.experiments.compilation.engine_programs import unread
from kvjax.experiments.report import wording
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import prefilling, progress_bar, stopwatch
from kvjax.experiments.run.candidates import Candidate
from kvjax.experiments.timing import kernel_timing
from kvjax.experiments.timing.kernel_timing import Bandwidth
from kvjax.models.language_model import DecoderModel
from kvjax.models.pretrained import Pretrained
from kvjax.struct import tree_bytes


class Decoded(NamedTuple):
  """Decoding from a candidate's cache.

  Attributes:
    candidate: the candidate.
    cache_bytes: bytes allocated for all rows.
    read_tokens: tokens that a token attends to, mean over rows, layers and KV
      heads.
    least_bytes: bytes that a step must move: the weights that one token needs,
      and the keys and values that all rows read.
    seconds: seconds per step (one token per row) in each round.
  """

  candidate: Candidate
  cache_bytes: int
  read_tokens: float
  least_bytes: float
  seconds: Sequence[float]

  @property
  def step(self) -> float:
    """Seconds per step in the median round."""
    return statistics.median(self.seconds)


def measure(
  lm: Pretrained,
  chosen: Sequence[Candidate],
  contexts: kvjax.Prompts,
  tokens: int,
  rounds: int,
) -> tuple[Bandwidth, list[Decoded]]:
  """Decodes from every candidate's cache and reads an array, in turns.

  Args:
    lm: the model.
    chosen: methods and budgets.
    contexts: the prompts, which decode as one batch.
    tokens: tokens that every row decodes per round, without stopping early.
    rounds: number of timings of each, after compilation.
  """
  with progress_bar.progress_bar(None, "prefilling", transient=True):
    results = prefilling.prefill_all(lm, [c.plan for c in chosen], contexts)
    jax.block_until_ready(results)
  decoding = kvjax.Decoding(tokens)

  def decode(result: prefilling.Prefilled) -> float:
    return stopwatch.seconds(
      lambda: kvjax.generate(
        lm.model, lm.params, result.cache, result.logits, decoding
      )
    )

  for result in progress_bar.track(results, "compiling"):
    decode(result)
  read = kernel_timing.reading(kernel_timing.READ)
  reading, *times_of = stopwatch.in_turns(
    [read, *(functools.partial(decode, result) for result in results)],
    progress_bar.track(range(rounds), "timing"),
  )
  return Bandwidth(kernel_timing.READ, reading), [
    Decoded(
      candidate,
      result.cache.nbytes,
      float(np.mean(result.cache.num_attended)),
      weight_bytes(lm) + _read_bytes(lm, result.cache),
      [each / tokens for each in times],
    )
    for candidate, result, times in zip(chosen, results, times_of, strict=True)
  ]


HEADING = (
  *("method", "budget", "cache MiB", "reads", "ms a step", "tokens/s"),
  *("× full", "% of bandwidth"),
)


def table(bandwidth: Bandwidth, results: Sequence[Decoded], rows: int) -> Table:
  """Builds the table; the first candidate is the baseline."""
  full, speed = results[0].step, bandwidth.bytes_per_second
  lines = [
    (
      result.candidate.method,
      result.candidate.budget,
      f"{result.cache_bytes / rows / 2**20:,.2f}",
      f"{result.read_tokens:,.0f}",
      wording.milliseconds(result.step),
      f"{rows / result.step:,.0f}",
      f"{full / result.step:.2f}",
      f"{100 * result.least_bytes / result.step / speed:.1f}",
    )
    for result in results
  ]
  return Table("", HEADING, lines, names=2)


def weight_bytes(lm: Pretrained) -> int:
  """Counts bytes of the weights that a token needs, on all devices.

  Of models of other packages, these are all.
  """
  if not isinstance(lm.model, DecoderModel):
    return tree_bytes(lm.params)
  return tree_bytes(lm.params) - unread(lm.model, lm.params, tree_bytes)


def _read_bytes(lm: Pretrained, cache: kvjax.Cache) -> float:
  """Counts bytes of the keys and values read, in all layers and rows."""
  dtype = jax.tree.leaves(lm.params)[0].dtype
  layer = lm.model.geometry.layers[0]
  each = (layer.key_dim + layer.value_width) * dtype.itemsize
  return float(np.sum(cache.num_attended)) * each
