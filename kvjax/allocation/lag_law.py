"""LagKV's law: sinks, a share of every partition, and a sliding window."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.allocation.base import Allocation, LayerBudget, Sizes, in_all_layers
from kvjax.allocation.partitions import Partitions
from kvjax.cache.layers import LayerCache
from kvjax.errors import InputError
from kvjax.options.budgets import Budget, Retention


@dataclasses.dataclass(frozen=True)
class LagLaw(Allocation):
  """Keeps a share of every partition that another one follows.

  With retention r, each scored partition keeps floor(r L) tokens. A row of n
  tokens keeps S + floor(r L) (P - 1) + L + (n - S) mod L of them, where
  P = floor((n - S) / L), and all n if n < S + 2 L. A budget in tokens is met as
  closely as that law allows, and so is a retention of the row.

  Source: Liang et al., arXiv 2504.04704, equations 1, 2 and 13.

  Attributes:
    sinks: S.
    lag: L.
    of_row: whether a retention is a share of the row instead of each scored
      partition.
  """

  prescribes = True

  sinks: int
  lag: int
  of_row: bool = False

  def can_follow(self, earlier: Allocation, *, same_budget: bool) -> bool:
    """Only from the same law: what it has kept once has a fixed size."""
    return same_budget and earlier == self

  def counts(
    self, budget: Budget, lengths: Int[np.ndarray, " n"], sizes: Sizes
  ) -> Int[np.ndarray, "L n"]:
    """The law, the same for all layers; it is not monotonic in the length."""
    kept = [self._kept(budget, int(n)) for n in lengths]
    return in_all_layers(kept, sizes)

  def share(self, budget: Budget, length: int) -> int:
    """Number of tokens kept of each scored partition of a row."""
    if isinstance(budget, Retention) and not self.of_row:
      # 0.29 * 100 is 28.999999999999996: that must not round down to 28.
      return int(budget.share * self.lag + 1e-9)
    scored = (length - self.sinks) // self.lag - 1
    fixed = length - scored * self.lag
    # The law, solved for the tokens per partition.
    per_partition = round((budget.num_kept(length) - fixed) / scored)
    return min(max(per_partition, 0), self.lag)

  def capacity_between(self, budget: Budget, padded: int) -> int:
    """Maximum tokens of a row of up to `padded` after an eviction."""
    # The maxima of successive periods of L tokens never fall, so that the last
    # two periods suffice.
    before = min(padded, self.sinks + 2 * self.lag - 1)
    after = range(max(before, padded - 2 * self.lag), padded + 1)
    return max(self._kept(budget, n) for n in after)

  def is_due(self, cache: LayerCache, budget: LayerBudget) -> Bool[Array, ""]:
    """Whether any row has a partition that a complete one follows."""
    del budget
    return jnp.any(Partitions.of(cache, self.sinks, self.lag).num_complete > 1)

  def check_recursive(self, budget: Budget, name: str) -> None:
    """Refuses a budget in tokens, or of the row.

    Args:
      budget: the budget.
      name: what users call the method, for messages.

    Raises:
      InputError: the budget is no retention of the partitions.
    """
    if self.of_row:
      raise InputError(
        f"{name} keeps a share of every partition, however many there will be: "
        "choose retention_of=partition."
      )
    if not isinstance(budget, Retention):
      raise InputError(
        f"{name} keeps a share of every partition, however many there will be: "
        f"give a retention in place of {budget}, or choose mode=kvpress, "
        "which keeps exactly so many."
      )

  def check_protected(
    self,
    protected: Bool[np.ndarray, " n"],
    budget: Budget,
    sizes: Sizes,
    *,
    repeated: bool = False,
  ) -> None:
    """Refuses a partition that protects more tokens than it keeps.

    Raises:
      InputError: they are too many.
    """
    super().check_protected(protected, budget, sizes)
    length = len(protected)
    # The last complete partition and what follows it are kept, until more
    # tokens come.
    scored = (length - self.sinks) // self.lag - 1
    end = length if repeated else self.sinks + scored * self.lag
    if end <= self.sinks:
      return
    per_partition = self.share(budget, length)
    for start in range(self.sinks, end, self.lag):
      count = protected[start : start + self.lag].sum()
      if count > per_partition:
        raise InputError(
          f"{count} tokens of a partition of {self.lag} are protected and "
          f"{per_partition} of it are kept; protect fewer or give a larger "
          "budget."
        )

  def _kept(self, budget: Budget, length: int) -> int:
    if length < self.sinks + 2 * self.lag:
      return length
    scored = (length - self.sinks) // self.lag - 1
    fixed = length - scored * self.lag
    return fixed + scored * self.share(budget, length)
