"""Quest: pages of keys, ranked by an upper bound of their logits."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.kernels.select import largest
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import (
  KeyAccess,
  KeyBudget,
  Prompt,
  Retrieval,
  Selection,
  Store,
)
from kvjax.struct import struct

_LEAST_PAGES = 3

Group = Literal["head", "max"]


@dataclasses.dataclass(frozen=True)
class Paged(Retrieval):
  """Base of methods that read whole pages of consecutive keys.

  Attributes:
    local: minimum number of resident last tokens of the prompt; more are
      resident where that leaves whole pages to be stored.
    page: tokens per page.
  """

  key_access: ClassVar[KeyAccess] = "none"

  sinks: int = 0
  local: int = 1
  page: int = 16

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, page=1)

  @property
  def local_range(self) -> tuple[int, int]:
    """From `local` to `local` plus an incomplete page."""
    return self.local, self.local + self.page - 1

  def num_local(self, length: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """The tokens after the last whole page, but at least `local`."""
    # % is never negative, even where the row is shorter than sinks + local.
    return self.local + (length - self.sinks - self.local) % self.page

  def to_pages(self, x: Shaped[Array, "F *A"]) -> Shaped[Array, "P C *A"]:
    """Reshapes slots to pages of C, padding the last with zeros."""
    padding = ((0, -x.shape[0] % self.page), *((0, 0) for _ in x.shape[1:]))
    return jnp.pad(x, padding).reshape(-1, self.page, *x.shape[1:])

  def filled(self, valid: Bool[Array, " F"]) -> Bool[Array, " P"]:
    """Mask of the pages that contain a key."""
    return jnp.any(self.to_pages(valid), axis=1)

  def select_best(
    self,
    scores: Float[Array, "J P"],
    valid: Bool[Array, " F"],
    max_pages: int,
    num_pages: Int[Array, ""],
  ) -> Selection:
    """Selects the slots of the pages with the highest scores, then -1.

    Args:
      scores: one row per list; pages of score -inf are not read.
      valid: slots that contain a key.
      max_pages: pages that any row of the batch reads.
      num_pages: pages that this row reads.
    """
    max_pages = min(max_pages, scores.shape[1])
    filled = self.filled(valid)
    slots = jnp.arange(filled.shape[0] * self.page, dtype=jnp.int32)
    table = jnp.where(self.to_pages(valid), slots.reshape(-1, self.page), -1)

    def select(scores: Float[Array, " P"]) -> Int[Array, " M"]:
      pages = largest(jnp.where(filled, scores, -jnp.inf), num_pages, max_pages)
      # Index -1 reads the last page, which is then masked.
      return jnp.where((pages >= 0)[:, None], table[pages], -1).reshape(-1)

    return Selection(jax.vmap(select)(scores), page=self.page)


@struct
class Bounds:
  """Bounding box of the keys of each page; zero for an empty page.

  Attributes:
    low: minimum of every channel.
    high: maximum of every channel.
  """

  low: Float[Array, "*B P D"]
  high: Float[Array, "*B P D"]

  def upper_bound(self, queries: Float[Array, "G D"]) -> Float[Array, "G P"]:
    """Upper bound of the product of a query with any key of a page."""
    low, high = self.low.astype(jnp.float32), self.high.astype(jnp.float32)
    # q_d M_d is the larger product where q_d is positive, q_d m_d elsewhere.
    positive, negative = jnp.maximum(queries, 0.0), jnp.minimum(queries, 0.0)
    return positive @ high.T + negative @ low.T


@dataclasses.dataclass(frozen=True)
class Quest(Paged):
  """Reads the pages that may contain the keys a head attends to most.

  A page stores the minimum m_d and the maximum M_d of its keys in each channel
  d. Its score

    sum_d max(q_d m_d, q_d M_d)

  is an upper bound of q k for all keys k of the page. Every query head reads
  the floor(budget / page) pages with the highest scores, but at least three.
  The newest page, which may be incomplete, is resident.

  Source: Tang et al., arXiv 2406.10774, Section 3.

  Attributes:
    group: "head" selects pages for every query head separately; "max" selects
      the same pages for all heads of a KV head, by their maximum score.
  """

  dense_layers: tuple[int, ...] = (0, 1)
  group: Group = "head"

  def num_queries(self, length: int) -> int:
    """No queries: the index depends on keys alone."""
    return 0

  def index(self, prompt: Prompt, budget: KeyBudget) -> Bounds:
    """Computes the bounds of every page."""
    valid = self.to_pages(prompt.stored)[..., None]
    keys = self.to_pages(prompt.stored_keys)
    filled = self.filled(prompt.stored)[:, None]
    # A bound is a channel of some key, which the cache's dtype holds exactly.
    # Empty pages get 0, as 0 times inf in `upper_bound` would be NaN.
    low = jnp.min(keys, axis=1, where=valid, initial=jnp.inf)
    high = jnp.max(keys, axis=1, where=valid, initial=-jnp.inf)
    dtype = prompt.head.cached_keys.dtype
    return Bounds(
      jnp.where(filled, low, 0.0).astype(dtype),
      jnp.where(filled, high, 0.0).astype(dtype),
    )

  def retrieve(
    self,
    index: Bounds,
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> tuple[Selection, None]:
    """Selects the slots of the best pages."""
    scores = index.upper_bound(queries)
    if self.group == "max":
      scores = jnp.max(scores, axis=0, keepdims=True)
    # Rounded up, so that a row that may read all of its keys can do so.
    max_pages = max(-(-budget.max_keys // self.page), _LEAST_PAGES)
    num_pages = jnp.maximum(budget.num_keys // self.page, _LEAST_PAGES)
    return self.select_best(scores, store.valid, max_pages, num_pages), None
