"""E4.5: decoding throughput by batch size, and at equal device memory."""

from collections.abc import Mapping, Sequence

import jax
from jaxtyping import Array, Float

import kvjax
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report.formats import Table
from kvjax.experiments.run import stopwatch
from kvjax.experiments.run.progress_bar import track
from kvjax.models.pretrained import Pretrained
from kvjax.placement import DEVICE, HOST

_STEPS, _ROUNDS = 16, 3
_BATCHES = (1, 2, 4, 8)
# Prompts whose full caches are the device memory that every method gets.
_FULL_ROWS = 2
_FULL = "full"
_METHODS = (
  *("ctkvr", "ctkvr:rerank=false", "ctkvr:offload=true", "magicpig.8x75"),
)


def measure(subject: Subject) -> Findings:
  """Measures tokens per second of dense attention and of retrieval."""
  reads = kvjax.Tokens(512 if subject.scale == "paper" else 32)
  plans = {
    _FULL: kvjax.get_plan(_FULL, kvjax.Retention(1.0)),
    **{name: kvjax.get_plan(name, reads) for name in _METHODS},
  }
  (length,) = subject.lengths
  title = f"prompts of {length:,} tokens, {_STEPS} decoded, {reads} retrieved"
  return Findings(
    [_by_batch(subject, plans, title), _at_equal_memory(subject, plans, title)],
    [
      "Device memory is that of the caches and indexes alone. MagicPIG keeps "
      "keys and values on the device here, in its paper on the host."
    ],
  )


def largest_batch(bytes_of_row: int, budget: int) -> int:
  """The number of rows that fit into some bytes, at least one."""
  return max(budget // bytes_of_row, 1)


def _by_batch(
  subject: Subject, plans: Mapping[str, kvjax.Plan], title: str
) -> Table:
  lines = []
  for batch in track(_BATCHES):
    caches, logits = _prefilled(subject, list(plans.values()), batch)
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
  header = ["batch", "method", "tokens/s", "× full", "MiB"]
  return Table(title, header, lines, names=2)


def _at_equal_memory(
  subject: Subject, plans: Mapping[str, kvjax.Plan], title: str
) -> Table:
  caches, _ = _prefilled(subject, list(plans.values()), 1)
  of_row = {
    name: cache.nbytes_by_memory
    for name, cache in zip(plans, caches, strict=True)
  }
  del caches
  budget = _FULL_ROWS * of_row[_FULL][DEVICE]
  lines = []
  full = 0.0
  for name, plan in track(list(plans.items())):
    batch = largest_batch(of_row[name][DEVICE], budget)
    (cache,), logits = _prefilled(subject, [plan], batch)
    rate = batch * _STEPS / _seconds(subject.lm, cache, logits)
    full = full or rate
    on_device, on_host = (of_row[name][kind] for kind in (DEVICE, HOST))
    lines.append(
      [
        name,
        str(batch),
        f"{on_device / 2**20:.2f}",
        f"{on_host / 2**20:.2f}",
        f"{rate:,.0f}",
        f"{rate / full:.2f}",
      ]
    )
  header = ["method", "batch", "device MiB", "host MiB", "tokens/s", "× full"]
  return Table(
    f"the largest batch in {budget / 2**20:.1f} MiB of device memory, {title}; "
    "MiB of a row",
    header,
    lines,
  )


def _prefilled(
  subject: Subject, plans: Sequence[kvjax.Plan], batch: int
) -> tuple[Sequence[kvjax.Cache], Float[Array, "B V"]]:
  """Prefills random prose, the same rows first for every batch."""
  (length,) = subject.lengths
  prompts = subject.random_prose(batch, length - _STEPS)
  caches, logits = kvjax.sweep(
    subject.lm.model, subject.lm.params, prompts, plans
  )
  return caches, jax.block_until_ready(logits)


def _seconds(
  lm: Pretrained, cache: kvjax.Cache, logits: Float[Array, "B V"]
) -> float:
  """Measures the minimum time of several decodings, after compilation."""
  decoding = kvjax.Decoding(_STEPS)
  return min(
    stopwatch.repeated(
      lambda: kvjax.generate(lm.model, lm.params, cache, logits, decoding),
      _ROUNDS,
    )
  )
