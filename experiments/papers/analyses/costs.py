"""E2.10: operations and memory of an eviction by KeyDiff."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

import kvjax
from kvjax.cache.layers import LayerCache
from kvjax.experiments.papers.findings import Findings, Subject
from kvjax.experiments.report.formats import Table
from kvjax.testing import random_activations

_DIM = 128
_BLOCK, _WINDOW = 128, 32
# What an operation costs: as the paper counts (its fourth version), and by an
# older weighting.
_PAPER = {"*": 3, "+": 1, "/": 47, "sqrt": 1}
_OLDER = {"*": 1, "+": 1, "/": 5, "sqrt": 8}


def measure(subject: Subject) -> Findings:
  """Counts operations of scoring a head, and entries of extra memory."""
  lines = []
  for budget in subject.lengths:
    keys = budget + _BLOCK
    count = operations(keys, _DIM, _PAPER)
    lines.append(
      [
        f"{budget:,}",
        f"{count:,}",
        f"{operations(keys, _DIM, _OLDER):,}",
        f"{_compiled(keys):,.0f}",
        f"{count / (keys * _DIM):.2f}",
      ]
    )
  header = ["N", "FLOPs", "other weights", "by XLA", "FLOPs per number"]
  title = (
    f"operations to score N + {_BLOCK} keys of a KV head with KeyDiff, D = "
    f"{_DIM}"
  )
  return Findings(
    [Table(title, header, lines), _memory(subject.lengths)],
    [
      "The paper (B.1) weighs a multiplication as 3, a division as 47, an "
      "addition and a root as 1: 12 n D + 3 D + 97 n + 47 for n keys. Its list "
      "has 2 n + 2 divisions, its steps need 2 n + 1. With 5 for a division, 8 "
      "for a root and 1 for the rest it is 6 n D + D + 18 n + 12. XLA counts "
      "the compiled program, which weighs operations differently.",
      "Orders of memory are those of the paper's Table 2, except that it has "
      "O(1) for Sink, where its text has O(N).",
    ],
  )


def operations(keys: int, dim: int, costs: Mapping[str, int]) -> int:
  """Counts the operations of scoring keys.

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
  return sum(costs[name] * count for name, count in counts.items())


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
    numbers = (budget, keys, keys, budget, _WINDOW * keys, _BLOCK * keys)
    lines.append([f"{number:,}" for number in numbers])
  header = ["N", "KeyDiff", "TOVA", "Sink", "SnapKV", "H2O"]
  title = (
    f"numbers of extra memory per KV head, blocks of {_BLOCK}, window of "
    f"{_WINDOW}"
  )
  return Table(title, header, lines)
