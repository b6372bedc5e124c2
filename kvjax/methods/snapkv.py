"""SnapKV: the last queries vote for tokens of the prefix."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.cache.observation import ObservationWindow
from kvjax.kernels.select import mask_to_slots
from kvjax.methods.base import ScoringMethod
from kvjax.methods.last_queries import window_mass, window_queries
from kvjax.methods.traits import Traits
from kvjax.options.bounds import check_least, check_odd
from kvjax.selection import last_tokens

Pooling = Literal["avg", "max"]
Group = Literal["mean", "max"]


@dataclasses.dataclass(frozen=True)
class SnapKV(ScoringMethod):
  """Keeps the observation window and the prefix tokens that it attends to.

  The vote for a prefix token is its attention from the last W queries, summed
  over the window, reduced over the group's query heads, and pooled along the
  prefix, which favors runs of neighbors.

  Source: Li et al., arXiv 2404.14469. Presets follow the code or paper that
  they are named after.

  Attributes:
    window: W, number of last tokens, which are always kept.
    kernel: odd width of the pooling, with stride 1; 1 for none.
    pooling: "avg" divides by the kernel at the borders too; "max".
    group: how the group's query heads are reduced.
    paper_postproc: first scale votes by |v_i| and pool with kernel 3, as
      Compactor's paper does for all attention scores.
    sinks: number of first tokens that are always kept.
    keep: the prefix tokens with the "most" votes or, for ablations, those with
      the "least".
    queries_at: whether queries stay at their "own" positions or are all moved
      to the "last" one, as kvpress does while decoding.
  """

  window: int = 32
  kernel: int = 5
  pooling: Pooling = "avg"
  group: Group = "mean"
  paper_postproc: bool = False
  sinks: int = 0
  keep: Literal["most", "least"] = "most"
  queries_at: Literal["own", "last"] = "own"

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, window=1, sinks=0)
    check_odd(self, "kernel")

  @property
  def traits(self) -> Traits:
    """It reads the last W queries and keeps their tokens."""
    moves = self.queries_at == "last"
    return Traits(
      window=self.window,
      queries=self.window,
      protects=self.window,
      sinks=self.sinks,
      weighs=self.keep == "most" and not self.paper_postproc,
      activations=frozenset({"rerotate"} if moves else ()),
    )

  def scores(
    self, layer: Int[Array, ""], cache: LayerCache, activations: Activations
  ) -> Float[Array, "B K T"]:
    """Computes pooled votes; those of the window are zero."""
    del layer
    valid = cache.valid
    if self.queries_at == "last":
      cache = _move_queries(cache, activations, self.window)
    votes = window_mass(cache, activations, self.window)
    reduce = jnp.mean if self.group == "mean" else jnp.max
    prefix = valid & ~last_tokens(valid, self.window)
    # Zero before pooling, which would spread the window's attention to itself
    # to the last tokens of the prefix.
    votes = jnp.where(prefix, reduce(votes, axis=2), 0.0)
    if self.paper_postproc:
      votes = pool(votes * value_norms(cache), valid, 3, "avg")
      votes = jnp.where(prefix, votes, 0.0)
    votes = pool(votes, valid, self.kernel, self.pooling)
    return votes if self.keep == "most" else -votes

  def as_weights(self, scores: Float[Array, "B K T"]) -> Float[Array, "B K T"]:
    """The mean votes of the window."""
    return scores / self.window


def _move_queries(
  cache: LayerCache, activations: Activations, window: int
) -> LayerCache:
  """Moves the last queries to the last position; each sees what it saw."""
  queries, positions = window_queries(cache, activations, window)
  last = jnp.max(positions, axis=1, keepdims=True)
  by = jnp.broadcast_to((last - positions)[:, None], queries.shape[:3])
  assert activations.rerotate is not None
  moved = activations.rerotate(queries, by)
  # A block may be shorter than the window: there are no queries before it.
  before = window - positions.shape[1]
  moved = jnp.pad(moved, ((0, 0), (0, 0), (before, 0), (0, 0)))
  positions = jnp.pad(positions, ((0, 0), (before, 0)), constant_values=-1)
  return dataclasses.replace(cache, window=ObservationWindow(moved, positions))


def value_norms(cache: LayerCache) -> Float[Array, "B K T"]:
  """Computes float32 |v_i| of every slot, 0 for empty slots."""
  return jnp.linalg.norm(cache.float_values, axis=-1)


def pool(
  votes: Float[Array, "B K T"],
  valid: Bool[Array, "B K T"],
  kernel: int,
  pooling: Pooling,
) -> Float[Array, "B K T"]:
  """Pools over neighboring tokens; stride 1, zeros beyond the ends.

  Args:
    votes: one per slot.
    valid: slots that contain a token; the others are skipped.
    kernel: width, odd.
    pooling: "avg" always divides by the kernel.
  """
  if kernel == 1:
    return votes
  # Rows may have empty slots between tokens, so neighbors are found first.
  order = mask_to_slots(valid, valid.shape[-1])
  take = functools.partial(jnp.take_along_axis, axis=-1)
  in_order = jnp.where(order >= 0, take(votes, jnp.maximum(order, 0)), 0.0)
  # Votes are not negative: a maximum ignores the zeros after the last token.
  start, operation = (
    (0.0, jax.lax.add) if pooling == "avg" else (-jnp.inf, jax.lax.max)
  )
  # A wider one reaches beyond both ends from every token.
  width = min(kernel, 2 * valid.shape[-1] - 1)
  pooled = jax.lax.reduce_window(
    in_order, jnp.float32(start), operation, (1, 1, width), (1, 1, 1), "SAME"
  )
  # Back from the place among the tokens to the slot.
  number = jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1
  pooled = take(pooled, jnp.maximum(number, 0))
  return pooled / kernel if pooling == "avg" else pooled
