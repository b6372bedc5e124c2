"""E2.10: operations and memory of an eviction by KeyDiff."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.experiments.paper_experiments.findings import Findings, Subject
from kvjax.experiments.reporting.formats import Table
from kvjax.testing import random_activations

_DIM = 128
_BLOCK, _WINDOW = 128, 32
# What an operation costs in the paper.
_COSTS = {"*": 1, "+": 1, "/": 5, "sqrt": 8}


def measure(subject: Subject) -> Findings:
  """Counts operations of scoring a head, and entries of extra memory."""
  lines = []
  for budget in subject.lengths:
    keys = budget + _BLOCK
    count, compiled = operations(keys, _DIM), _compiled(keys)
    lines.append(
      [
        f"{budget:,}",
        f"{count:,}",
        f"{compiled:,.0f}",
        f"{count / (keys * _DIM):.2f}",
      ]
    )
  header = ["N", "by formula", "by XLA", "per number of a key"]
  title = (
    f"operations to score N + {_BLOCK} keys of a KV head with KeyDiff, D = "
    f"{_DIM}"
  )
  return Findings(
    [Table(title, header, lines), _memory(subject.lengths)],
    [
      "The formula is our recount, 6 n D + D + 18 n + 12 for n keys, with 5 "
      "for a division and 8 for a root; that of the paper is lost in our copy. "
      "XLA counts the compiled program, which weighs operations differently.",
      "Memory is inferred from the paper's text.",
    ],
  )


def operations(keys: int, dim: int) -> int:
  """Counts the operations of scoring keys, weighted as in the paper.

  Keys are divided by their norms and averaged; a score is the cosine of a key
  and this mean.
  """
  numbers = keys * dim
  counts = {
    "*": 3 * numbers + dim + keys,
    "+": 3 * numbers - keys - 1,
    "/": 2 * keys + 1,
    "sqrt": keys + 1,
  }
  return sum(_COSTS[name] * count for name, count in counts.items())


def _compiled(keys: int) -> float:
  """Counts the operations of the compiled program, as XLA estimates them."""
  activations = random_activations(
    0, [keys], keys, heads=1, kv_heads=1, head_dim=_DIM
  )
  cache, layer = LayerCache.of(activations), jnp.zeros((), jnp.int32)
  method = kvjax.get_method("keydiff")
  program = jax.jit(lambda x: method.evaluate(layer, x, activations))
  analysis = program.lower(cache).compile().cost_analysis() or {}
  return float(analysis.get("flops", float("nan")))


def _memory(budgets: Sequence[int]) -> Table:
  """Builds a table of the numbers that methods store besides the cache."""
  lines = []
  for budget in budgets:
    keys = budget + _BLOCK
    lines.append(
      [
        f"{budget:,}",
        f"{keys:,}",
        f"{keys:,}",
        f"{budget:,}",
        f"{_WINDOW * keys:,}",
        f"{_BLOCK * keys:,}",
      ]
    )
  header = ["N", "KeyDiff", "TOVA", "Sink", "SnapKV", "H2O"]
  title = (
    f"numbers of extra memory per KV head, blocks of {_BLOCK}, window of "
    f"{_WINDOW}"
  )
  return Table(title, header, lines)
