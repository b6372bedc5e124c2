"""CTkvr: an inverted file of keys whose centroids are recent queries."""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.clustering import unit
from kvjax.errors import InputError
from kvjax.heads import Head
from kvjax.kernels.select import largest
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import (
  Found,
  KeysRead,
  Prompt,
  Reads,
  Retrieval,
  Store,
  attention_worth,
)
from kvjax.selection import exact_share, floor_share
from kvjax.struct import struct

_MOST_CENTROIDS = 2048
# Logits per query head that are alive at once while the lists are made.
_LOGITS = 2**17
_MOST_RATIO = 1000

Choice = Literal["final", "init", "random", "equi"]


@struct
class Lists:
  """The inverted file of one KV head: a ring of centroids with their keys.

  Attributes:
    centroids: queries of norm 1, one for each head that reads the KV head.
    slots: of each centroid, the keys that it attends to most, once each; -1
      for none. What comes to be stored later has a number before; see `Store`.
    size: how many centroids the ring has; the others are empty.
    oldest: the one to be replaced next.
  """

  centroids: Float[Array, "*B G C D"]
  slots: Int[Array, "*B C R"]
  size: Int[Array, "*B"]
  oldest: Int[Array, "*B"]


@dataclasses.dataclass(frozen=True)
class CTkvr(Retrieval):
  """Finds keys by way of the most similar of the prompt's last queries.

  Neighboring queries attend to much the same keys. So the last C queries q_c
  of the prompt become centroids, and each lists the rho keys that it attends
  to most: max over the group's heads of softmax(q_c K^T / sqrt(D)), over all
  keys of the prompt, resident ones left out afterwards. A token

  1. recalls the lists of the `probes` centroids of the highest cosine with its
     query, max over the group's heads, and drops what is in them twice;
  2. reranks these keys by its own softmax(q K^T / sqrt(D)), max over the
     group's heads, and reads the best rho' of them;
  3. takes the place of the oldest centroid, with the best rho of what it
     recalled as its list.

  With `max_resident`, the oldest resident token but the sinks is stored when
  it must make room for a new one. So that it is found then, lists name resident
  keys before: no keys but the sinks are left out of those of the prompt, and a
  token lists the best rho of what it recalled and of the resident ones up to
  itself. What is still resident is not recalled.

  Source: CTkvr, sections 4.1-4.3; the ring is its dynamic centroid update. Of
  what happens to resident tokens in the long run it says nothing.

  Attributes:
    centroids: C; 0 is a sixteenth of the prompt, at most 2,048.
    probes: C', lists that a token recalls.
    list_ratio: rho / rho', the length of a list over the keys to be read, to
      three decimals.
    choice: centroids are the "final" queries of the prompt, its "init"ial
      ones, "random" ones or "equi"distant ones.
    rerank: without it all keys are read that were recalled.
    update: whether decoded tokens become centroids.
    causal: centroids list keys of their own past only.
    mask: resident keys leave the lists "before" they are cut to rho keys, or
      "after".
    max_resident: most resident tokens of a row and KV head, sinks included; 0
      for no limit.
    seed: of the random choice.
  """

  reads_keys: ClassVar[KeysRead] = "candidates"

  centroids: int = 0
  probes: int = 4
  list_ratio: float = 2.5
  choice: Choice = "final"
  rerank: bool = True
  update: bool = True
  causal: bool = False
  mask: Literal["before", "after"] = "before"
  max_resident: int = 0
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    check_least(self, centroids=0, probes=1, list_ratio=1)
    if self.list_ratio > _MOST_RATIO:
      raise InputError(
        f"list_ratio must be {_MOST_RATIO} or less; {self.list_ratio:g} is not."
      )
    if self.max_resident:
      self._check_max_resident()

  def _check_max_resident(self) -> None:
    least = self.sinks + self.local + 1
    if self.max_resident < least:
      raise InputError(
        f"max_resident must be {least} or more, for sinks, local tokens and a "
        f"new one, or 0 for no limit; {self.max_resident} is not."
      )
    if not self.update:
      raise InputError(
        "max_resident stores tokens that only later centroids can list; it "
        "needs update=true."
      )
    if self.offload:
      raise InputError(
        "max_resident stores tokens while decoding, and what offload=true "
        "leaves with the host is only read there; choose one of the two."
      )

  @property
  def ring(self) -> int:
    """What `max_resident` leaves beside the sinks."""
    return self.max_resident - self.sinks if self.max_resident else 0

  def index(self, prompt: Prompt, reads: Reads) -> Lists:
    """Centroids and their lists."""
    head = prompt.head
    length = head.query_positions.shape[0]
    tokens = jnp.sum((head.query_positions >= 0).astype(jnp.int32))
    most = self.centroids or min(_MOST_CENTROIDS, length // 16)
    size = jnp.full((), self.centroids, jnp.int32)
    if not self.centroids:
      size = jnp.minimum(_MOST_CENTROIDS, tokens // 16)
    size = jnp.clip(size, 1, jnp.maximum(tokens, 1))
    most = min(max(most, 1), length)
    chosen = self._chosen(prompt, length, tokens, size)[:most]
    real = jnp.arange(most) < size
    queries = head.queries[:, chosen].astype(jnp.float32)
    queries = jnp.where(real[None, :, None], queries, 0.0)
    longest = math.floor(exact_share(self.list_ratio) * reads.most)
    rho = longest if self.ring else min(longest, prompt.end - prompt.start)
    tile = max(1, _LOGITS // head.positions.shape[0])
    wanted = self._list_length(reads)

    keys, numbers = head.keys, self._numbers(prompt)

    def listed(
      pair: tuple[Float[Array, "G D"], Int[Array, ""]],
    ) -> Int[Array, " R"]:
      query, position = pair
      worth = attention_worth(query, keys, self._seen(head, position))
      if self.mask == "before":
        worth = jnp.where(numbers >= 0, worth, -jnp.inf)
      slots = largest(worth, wanted, rho)
      return jnp.where(slots >= 0, numbers[slots], -1)

    slots = jax.lax.map(
      listed, (jnp.swapaxes(queries, 0, 1), chosen), batch_size=min(tile, most)
    )
    return Lists(
      unit(queries).astype(head.queries.dtype),
      jnp.where(real[:, None], slots, -1),
      size,
      jnp.zeros((), jnp.int32),
    )

  def candidates(
    self, index: Lists, queries: Float[Array, "G D"], store: Store
  ) -> Int[Array, " U"]:
    """What the nearest centroids list, once each."""
    return store.slots(self._recalled(index, unit(queries)))

  def retrieve(
    self,
    index: Lists,
    queries: Float[Array, "G D"],
    store: Store,
    reads: Reads,
  ) -> tuple[Found, tuple[Float[Array, "G D"], Int[Array, " R"]]]:
    """Reranks what is recalled; the news are a centroid and its list."""
    assert store.candidates is not None
    recalled, keys = store.candidates.slots, store.candidates.keys
    numbers = store.numbers(recalled)
    worth = attention_worth(queries, keys, recalled >= 0)

    def best(
      names: Int[Array, " U"], count: Int[Array, ""], most: int
    ) -> Int[Array, " R"]:
      places = largest(worth, count, most)
      return jnp.where(places >= 0, names[places], -1)

    read = recalled
    if self.rerank:
      read = best(recalled, reads.count, reads.most)
    if store.waiting is not None:
      keys = jnp.concatenate([keys, store.waiting.keys])
      numbers = jnp.concatenate([numbers, store.waiting.numbers])
      worth = attention_worth(queries, keys, numbers >= 0)
    news = best(numbers, self._list_length(reads), index.slots.shape[-1])
    return Found(read[None]), (
      unit(queries).astype(index.centroids.dtype),
      news,
    )

  def updated(
    self,
    index: Lists,
    news: tuple[Float[Array, "G D"], Int[Array, " R"]],
    real: Bool[Array, ""],
  ) -> Lists:
    """The news in the place of the oldest centroid."""
    if not self.update:
      return index
    direction, slots = news
    at = index.oldest

    def put(ring: Array, new: Array, axis: int) -> Array:
      old = jax.lax.dynamic_index_in_dim(ring, at, axis, keepdims=False)
      new = jnp.where(real, new, old)
      return jax.lax.dynamic_update_index_in_dim(ring, new, at, axis)

    return Lists(
      put(index.centroids, direction, 1),
      put(index.slots, slots, 0),
      index.size,
      jnp.where(real, (at + 1) % index.size, at),
    )

  def _list_length(self, reads: Reads) -> Int[Array, ""]:
    """How long this row's lists are: rho."""
    return floor_share(reads.count, self.list_ratio)

  def _chosen(
    self,
    prompt: Prompt,
    length: int,
    tokens: Int[Array, ""],
    size: Int[Array, ""],
  ) -> Int[Array, " S"]:
    """Numbers of the queries that become centroids, ascending.

    Args:
      prompt: whose queries.
      length: S, of the padded prompt.
      tokens: of the row.
      size: how many are chosen; what follows them means nothing.
    """
    number = jnp.arange(length, dtype=jnp.int32)
    if self.choice == "final":
      chosen = tokens - size + number
    elif self.choice == "init":
      chosen = number
    elif self.choice == "equi":
      # In floats: the product of two lengths may not fit an int32.
      share = (number.astype(jnp.float32) + 0.5) / size.astype(jnp.float32)
      chosen = jnp.floor(share * tokens.astype(jnp.float32)).astype(jnp.int32)
    else:
      key = prompt.key(self.seed)
      keys = jax.vmap(jax.random.fold_in, (None, 0))(key, number)
      draws = jax.vmap(jax.random.uniform)(keys)
      lowest = jnp.where(number < tokens, -draws, -jnp.inf)
      chosen = largest(lowest, size, length)
    return jnp.clip(chosen, 0, length - 1)

  def _seen(self, head: Head, position: Int[Array, ""]) -> Bool[Array, " T"]:
    """The slots that a centroid ranks."""
    return (
      head.valid & (head.positions <= position) if self.causal else head.valid
    )

  def _numbers(self, prompt: Prompt) -> Int[Array, " T"]:
    """What lists call each slot; -1 for what they must not name."""
    slots = prompt.lookup.shape[0]
    number = jnp.arange(slots, dtype=jnp.int32) - prompt.start
    stored = jnp.where(prompt.lookup, number, -1)
    if not self.ring:
      return stored
    # The resident ones behind them are numbered from where the stored end.
    empty = prompt.end - prompt.start - jnp.sum(prompt.lookup.astype(jnp.int32))
    waiting = prompt.head.valid & (number >= 0) & ~prompt.lookup
    return jnp.where(waiting, number + empty, stored)

  def _recalled(
    self, index: Lists, direction: Float[Array, "G D"]
  ) -> Int[Array, " M"]:
    """What the nearest centroids list."""
    centroids = index.centroids.astype(jnp.float32)
    near = jnp.max(jnp.einsum("gcd,gd->gc", centroids, direction), axis=0)
    real = jnp.arange(near.shape[0]) < index.size
    probes = min(self.probes, near.shape[0])
    near = jnp.where(real, near, -jnp.inf)
    lists = largest(near, jnp.asarray(probes), probes)
    return jnp.where(lists[:, None] >= 0, index.slots[lists], -1).reshape(-1)
