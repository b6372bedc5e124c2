"""The method under test and its test data."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from kvjax.activations import Activations
from kvjax.allocation.base import Allocation, LayerBudget, Sizes
from kvjax.methods.base import Method
from kvjax.methods.traits import Traits
from kvjax.options.budgets import Budget
from kvjax.prompts import Prompts
from kvjax.testing import checks
from kvjax.testing.checks import require

# Methods whose first layers keep everything choose in one of these.
_LAYERS = 3
_MOST_LAYERS = 64


class Subject:
  """A method under test, and its test data.

  Attributes:
    method: the method.
    exact: whether it always uses the whole budget.
    name: name of its class.
    traits: its traits.
    spread: its allocation.
    layer: the first layer from which it evicts; None if there is none.
    lengths: lengths of the rows.
    padded: width of the batch.
    model: a model with enough layers, one of which has a window unless tokens
      get new numbers.
    params: the weights.
    prompts: the rows.
  """

  def __init__(self, method: Method) -> None:
    self.method = method
    self.name = type(method).__name__
    self.traits, self.spread = method.traits, method.allocation
    require(
      isinstance(self.traits, Traits) and isinstance(self.spread, Allocation),
      f"The traits of {self.name} must be a kvjax.methods.Traits and its "
      "allocation a kvjax.allocation.Allocation; they are "
      f"{self.traits!r} and {self.spread!r}.",
    )
    self.exact = not self.traits.coarse
    chosen = (n for n in range(_MOST_LAYERS) if not self.traits.keeps_layer(n))
    self.layer = next(chosen, None)
    # Even the shortest row, half of it, is longer than the window and what
    # always stays, and has queries that the method does not read.
    traits = self.traits
    always = traits.protects + traits.sinks
    last = max(traits.window, always, traits.queries or 0)
    longest = max(56, 3 * last)
    self.lengths = [longest, longest // 2, longest * 2 // 3]
    self.padded = longest + 8
    layers = max(_LAYERS, (self.layer or 0) + 1)
    # Tokens of a window cannot follow the numbers of the others.
    hybrid = not self.traits.renumbers
    self.model = checks.model_for(layers, longest, hybrid)
    self.params = self.model.init()
    self.rows = checks.tokens(self.lengths)
    self.prompts = Prompts.of(self.rows, repeat_request=checks.REQUEST)

  def activations(self, seed: int = 0) -> Activations:
    """Draws random activations with all optional ones."""
    return checks.all_activations(seed, self.lengths, self.padded)

  def budget(
    self,
    budget: Budget,
    lengths: Sequence[int] | None = None,
    padded: int | None = None,
  ) -> LayerBudget:
    """Returns the budget of the layer under test."""
    assert self.layer is not None
    heads = (checks.KV_HEADS,) * (self.layer + 1)
    sizes = Sizes(heads, self.traits.protects)
    of = np.array(lengths or self.lengths)
    counts = self.spread.counts(budget, of, sizes)[self.layer]
    totals = self.spread.totals(budget, of, sizes)[self.layer]
    slots = padded or self.padded
    parts = self.spread.parts(budget, of, slots)
    return LayerBudget(
      jnp.asarray(counts),
      slots,
      total=jnp.asarray(totals),
      parts=None if parts is None else jnp.asarray(parts),
    )

  def check_counts(
    self,
    heads: Sequence[Sequence[int]],
    length: int,
    count: int,
    total: int,
    where: str,
  ) -> None:
    """Refuses heads of a row with too many or too few tokens.

    Args:
      heads: positions of the tokens of each head.
      length: length of the row.
      count: limit of each head, or of the mean over the heads.
      total: limit of all heads together.
      where: context for the message.
    """
    valid = [len(places) for places in heads]
    who, most = "a head", min(count, length)
    if self.spread.ragged:
      who, most, valid = "all heads together", total, [sum(valid)]
    require(
      max(valid) <= most,
      f"{self.name} keeps {max(valid)} tokens where {who} may keep {most} "
      f"({where}); select at most the budget's counts.",
    )
    require(
      min(valid) == most if self.exact else min(valid) >= 1,
      f"{self.name} keeps {min(valid)} tokens where {who} may keep {most} "
      f"({where}); keep as many as that, or let the traits say why not, as in "
      "coarse='it keeps whole chunks'.",
    )
