"""Chains of additions and subtractions, worked out a step per line.

Four solved chains precede each problem, in plain text without a chat template,
so that models of any size know the form.
"""

import random

from kvjax.experiments.benchmarks.math.problems import Problem

# What follows an answer is the next problem, by a model that goes on.
END = "\n\n"
_EXAMPLES = 4
_START, _CHANGE = 20, 3


def problem(rng: random.Random, steps: int) -> Problem:
  """Draws a number that changes so often, and never is below 1."""
  solved = [_chain(rng, steps) for _ in range(_EXAMPLES + 1)]
  *examples, last = solved
  statement = "".join(
    f"{chain}{lines}The final answer is {answer}.{END}"
    for chain, lines, answer in examples
  )
  chain, _, answer = last
  return Problem(statement, chain, "", str(answer))


def _chain(rng: random.Random, steps: int) -> tuple[str, str, int]:
  """Draws a chain; returns its statement, its solution and its result."""
  count = start = rng.randint(2, _START)
  changes, lines = "", ""
  for _ in range(steps):
    change = rng.randint(1, _CHANGE)
    more = change >= count or rng.random() < 0.5
    step = f" {'+' if more else '-'} {change}"
    after = count + change if more else count - change
    changes += step
    lines += f"{count}{step} = {after}\n"
    count = after
  return f"Problem: {start}{changes}\n", lines, count
