"""RULER's leaderboard numbers for scores at several lengths."""

import statistics
from collections.abc import Mapping

# Llama-2-7B's average at 4,096 tokens.
_ENOUGH = 85.6


def columns(scores: Mapping[int, float]) -> dict[str, str]:
  """Formats the averages of a model or method.

  Args:
    scores: the tasks' mean, 0 to 100, at each length.

  Returns:
    The means with weights 1, 2, ... from the shortest length, "rising", and
    from the longest, "falling", and the longest length with enough, if any.
  """
  lengths = sorted(scores)
  values = [scores[length] for length in lengths]
  weights = range(1, len(values) + 1)
  reached = [length for length in lengths if scores[length] >= _ENOUGH]
  longest = str(max(reached)) if reached else f"< {lengths[0]}"
  return {
    "rising": f"{statistics.fmean(values, weights):.1f}",
    "falling": f"{statistics.fmean(values, reversed(weights)):.1f}",
    f"effective length (≥ {_ENOUGH})": longest,
  }
