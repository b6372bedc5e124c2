"""A retrieval method and its number of keys per token."""

import dataclasses

import numpy as np
from jaxtyping import Int

from kvjax.errors import InputError
from kvjax.options.bounds import check_value
from kvjax.options.budgets import Budget, as_budget
from kvjax.retrieval.base import Retrieval


@dataclasses.dataclass(frozen=True)
class SparseAttention:
  """Attention to the resident tokens and to a few retrieved keys.

  Raises InputError if the method or the budget has the wrong type, or the
  method is no hashable value.

  Attributes:
    retrieval: the method that selects the keys.
    budget: keys that each KV head retrieves per token, in addition to the
      resident tokens; a retention is a share of the prompt. Numbers stand for
      budgets, as in `kvjax.get_plan`.

  Examples:
    >>> import numpy as np
    >>> import kvjax
    >>> retrieval = kvjax.get_retrieval("quest")
    >>> sparse = kvjax.SparseAttention(retrieval, 64)
    >>> sparse.num_keys(np.array([100, 50])).tolist()
    [64, 50]
  """

  retrieval: Retrieval
  budget: Budget

  def __init__(self, retrieval: Retrieval, budget: float | Budget) -> None:
    budget = as_budget(budget)
    # For callers without a static type checker.
    if not isinstance(retrieval, Retrieval) or not isinstance(budget, Budget):
      raise InputError(
        "Sparse attention takes a retrieval method and the number or the share "
        "of the keys that it retrieves, as in kvjax.SparseAttention("
        "kvjax.get_retrieval('quest'), 64), not "
        f"{retrieval!r:.80} and {budget!r:.80}."
      )
    check_value(retrieval)
    vars(self).update(retrieval=retrieval, budget=budget)

  @property
  def fixed(self) -> bool:
    """Whether the method sets the number of keys itself."""
    return self.retrieval.keys > 0

  def num_keys(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Keys that rows of these lengths retrieve per token."""
    num_keys = self.retrieval.num_keys
    return np.array([num_keys(self.budget, int(n)) for n in lengths], np.int32)

  def max_keys(self, padded: int, lengths: Int[np.ndarray, " B"]) -> int:
    """Bound of the keys of any row, the same for most rows of a bucket."""
    bound = self.retrieval.num_keys(self.budget, padded)
    return max(bound, int(self.num_keys(lengths).max()))
