"""Quest: pages of keys, ranked by a bound on what they hold."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.kernels.select import largest
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import (
  Found,
  KeysRead,
  Prompt,
  Reads,
  Retrieval,
  Store,
)
from kvjax.struct import struct

_LEAST_PAGES = 3

Group = Literal["head", "max"]


@dataclasses.dataclass(frozen=True)
class Paged(Retrieval):
  """Stores pages of consecutive keys and reads whole ones.

  Attributes:
    local: last tokens of the prompt that are resident, at least; as many more
      are as leave whole pages to be stored.
    page: tokens of a page.
  """

  reads_keys: ClassVar[KeysRead] = "none"

  sinks: int = 0
  local: int = 1
  page: int = 16

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, page=1)

  @property
  def latest_range(self) -> tuple[int, int]:
    """From `local` to less than a page more."""
    return self.local, self.local + self.page - 1

  def latest(self, length: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """What whole pages leave over, with `local` tokens at least."""
    return self.local + (length - self.sinks - self.local) % self.page

  def pages(self, x: Shaped[Array, "F *A"]) -> Shaped[Array, "P C *A"]:
    """Slots by pages of C; zeros fill up the last."""
    wide = ((0, -x.shape[0] % self.page), *((0, 0) for _ in x.shape[1:]))
    return jnp.pad(x, wide).reshape(-1, self.page, *x.shape[1:])

  def filled(self, valid: Bool[Array, " F"]) -> Bool[Array, " P"]:
    """Which pages hold a key."""
    return jnp.any(self.pages(valid), axis=1)

  def best(
    self,
    scores: Float[Array, "J P"],
    valid: Bool[Array, " F"],
    most: int,
    count: Int[Array, ""],
  ) -> Int[Array, "J M"]:
    """The slots of the pages of the highest scores, then -1.

    Args:
      scores: a row for each list; pages of score -inf are not read.
      valid: slots that hold a key.
      most: pages that any row of the batch reads.
      count: pages that this one reads.
    """
    most = min(most, scores.shape[1])
    filled = self.filled(valid)
    slots = jnp.arange(filled.shape[0] * self.page, dtype=jnp.int32)
    table = jnp.where(self.pages(valid), slots.reshape(-1, self.page), -1)

    def listed(scores: Float[Array, " P"]) -> Int[Array, " M"]:
      pages = largest(jnp.where(filled, scores, -jnp.inf), count, most)
      return jnp.where((pages >= 0)[:, None], table[pages], -1).reshape(-1)

    return jax.vmap(listed)(scores)


@struct
class Bounds:
  """The box around the keys of each page; zero where a page holds none.

  Attributes:
    low: their least value in every channel.
    high: their greatest.
  """

  low: Float[Array, "*B P D"]
  high: Float[Array, "*B P D"]

  def largest(self, queries: Float[Array, "G D"]) -> Float[Array, "G P"]:
    """What the product of a query with any key of a page is at most."""
    low, high = self.low.astype(jnp.float32), self.high.astype(jnp.float32)
    # The product with M_d is the larger one where q_d is positive.
    positive, negative = jnp.maximum(queries, 0.0), jnp.minimum(queries, 0.0)
    return positive @ high.T + negative @ low.T


@dataclasses.dataclass(frozen=True)
class Quest(Paged):
  """Reads the pages that may hold the keys a head attends to most.

  A page keeps the least value m_d and the greatest value M_d that its keys
  have in each channel d. Its score,

    sum_d max(q_d m_d, q_d M_d),

  is what q k is at most for any key k of it. Every query head reads the
  floor(budget / page) pages of the highest scores, three at least. The newest
  page, which may be a part of one, is resident.

  Source: Tang et al., arXiv 2406.10774, Section 3.

  Attributes:
    group: every query "head" chooses its own pages, or all heads of a KV head
      read those whose scores have the greatest "max"imum over them.
  """

  dense_layers: tuple[int, ...] = (0, 1)
  group: Group = "head"

  def index(self, prompt: Prompt, reads: Reads) -> Bounds:
    """The bounds of every page."""
    valid = self.pages(prompt.stored)[..., None]
    keys = self.pages(prompt.stored_keys)
    filled = self.filled(prompt.stored)[:, None]
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
    reads: Reads,
  ) -> tuple[Found, None]:
    """The slots of the best pages."""
    scores = index.largest(queries)
    if self.group == "max":
      scores = jnp.max(scores, axis=0, keepdims=True)
    # Rounded up, so that a row that may read all of its keys has the places.
    most = max(-(-reads.most // self.page), _LEAST_PAGES)
    count = jnp.maximum(reads.count // self.page, _LEAST_PAGES)
    return Found(self.best(scores, store.valid, most, count)), None
