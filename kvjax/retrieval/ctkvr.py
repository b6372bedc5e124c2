"""CTkvr: an inverted file of keys whose centroids are recent queries."""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.clustering import unit
from kvjax.errors import InputError
from kvjax.kernels.dispatch import target_platform
from kvjax.kernels.select import largest
from kvjax.options.bounds import check_least
from kvjax.retrieval.base import (
  Entry,
  KeyAccess,
  KeyBudget,
  Prompt,
  Ranking,
  Retrieval,
  Selection,
  Store,
)
from kvjax.retrieval.weights import max_attention, max_weights, scaled_logits
from kvjax.selection import exact_share, floor_share
from kvjax.struct import replace, struct

_MAX_CENTROIDS = 2048
# Maximum number of logits in memory while lists are built: per query head, and
# on GPUs and TPUs, which read all keys for each tile of centroids, per query of
# a group in all heads and rows.
_CPU_LOGITS = 2**17
_LOGITS = 2**25
_MAX_RATIO = 1000

Choice = Literal["final", "init", "random", "equi"]


@struct
class Lists:
  """The inverted file of one KV head: a ring of centroids with their keys.

  Attributes:
    centroids: queries of norm 1, one per query head of the group.
    slots: numbers of the keys that each centroid attends to most, unique; -1
      for none. Tokens that are stored later already have numbers; see `Store`.
    size: number of centroids in the ring; the remaining places are empty.
    oldest: the centroid that is replaced next.
  """

  centroids: Float[Array, "*B G C D"]
  slots: Int[Array, "*B C R"]
  size: Int[Array, "*B"]
  oldest: Int[Array, "*B"]


@dataclasses.dataclass(frozen=True)
class CTkvr(Retrieval):
  """Retrieves keys through the most similar of the prompt's last queries.

  Neighboring queries attend to similar keys. The last C queries q_c of the
  prompt become centroids, and each lists the rho keys that it attends to most:
  maximum over the group's heads of softmax(q_c K^T / sqrt(D)). The softmax is
  over all keys of the prompt; resident ones are removed before or after the
  list is cut to rho keys, as `mask` says. A token

  1. recalls the lists of the `probes` centroids with the highest cosine with
     its query, maximum over the group's heads, and removes duplicates;
  2. reranks these keys by its own softmax(q K^T / sqrt(D)), maximum over the
     group's heads, and reads the best rho' of them;
  3. replaces the oldest centroid, with the best rho of the recalled keys as its
     list.

  With `max_resident`, the oldest resident token except the sinks is stored when
  a new token needs its place. To make it retrievable then, lists contain
  resident keys in advance: the prompt's lists exclude only the sinks, and a
  token lists the best rho of the recalled keys and of the resident keys up to
  itself. Keys that are still resident are not recalled.

  Source: CTkvr, sections 4.1-4.3; the ring is its dynamic centroid update. The
  paper does not say what happens to resident tokens in the long run. Ours are
  the numbers of sinks and local tokens, 1 / sqrt(D), which matters only for the
  maximum, and removing resident keys before lists are cut.

  Attributes:
    centroids: C; 0 means a sixteenth of the prompt, at most 2,048.
    probes: C', number of lists that a token recalls.
    list_ratio: rho / rho', length of a list over the number of keys read, to
      three decimals.
    choice: centroids are the "final" queries of the prompt, its "init"ial
      ones, "random" ones or "equi"distant ones.
    rerank: whether to rerank; if not, all recalled keys are read.
    update: whether decoded tokens become centroids.
    causal: whether centroids list only keys of their own past.
    mask: remove resident keys "before" or "after" lists are cut to rho keys.
    max_resident: maximum number of resident tokens per row and KV head,
      including the sinks; 0 for no limit.
    seed: seed of the random choice.
  """

  key_access: ClassVar[KeyAccess] = "candidates"

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
    if self.list_ratio > _MAX_RATIO:
      raise InputError(
        f"list_ratio must be {_MAX_RATIO} or less; {self.list_ratio:g} is not."
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
  def ring_size(self) -> int:
    """Places that `max_resident` leaves after the sinks."""
    return self.max_resident - self.sinks if self.max_resident else 0

  def num_queries(self, length: int) -> int | None:
    """As many as there are centroids, if these are the final queries."""
    return self._most_centroids(length) if self.choice == "final" else None

  def index(self, prompt: Prompt, budget: KeyBudget) -> Lists:
    """Chooses the centroids and builds their lists."""
    indices, size = self._centroid_indices(prompt)
    real = jnp.arange(len(indices), dtype=jnp.int32) < size
    dtype = prompt.head.queries.dtype
    queries = prompt.head.queries[:, indices].astype(jnp.float32)
    queries = jnp.where(real[None, :, None], queries, 0.0)
    slots = self._build_lists(prompt, queries, indices, budget)
    return Lists(
      unit(queries).astype(dtype),
      jnp.where(real[:, None], slots, -1),
      size,
      jnp.zeros((), jnp.int32),
    )

  def candidates(
    self, index: Lists, queries: Float[Array, "G D"], store: Store
  ) -> Int[Array, " U"]:
    """Recalls the lists of the nearest centroids, without duplicates."""
    return store.slots(self._recall(index, unit(queries)))

  def retrieve(
    self,
    index: Lists,
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> tuple[Selection, tuple[Float[Array, "G D"], Int[Array, " R"] | None]]:
    """Reranks the recalled keys; the update is a centroid and its list."""
    assert store.candidates is not None
    recalled, logits = store.candidates.slots, store.candidates.logits
    numbers = store.numbers(recalled)
    scores = max_weights(logits, recalled >= 0)

    attended, slots = logits, recalled
    if self.rerank:
      order = largest(scores, budget.num_keys, budget.max_keys)
      attended, slots = logits[:, order], _listed(recalled, order)
    if store.pending is not None:
      others = scaled_logits(queries, store.pending.keys)
      logits = jnp.concatenate([logits, others], axis=-1)
      numbers = jnp.concatenate([numbers, store.pending.numbers])
      # The new centroid also lists resident keys, which will be stored later.
      # The slots above are read now and must not contain them.
      scores = max_weights(logits, numbers >= 0)
    order = largest(scores, self._list_length(budget), index.slots.shape[-1])
    update = self.update_of(index, queries, _listed(numbers, order))
    return Selection(slots[None], logits=attended), update

  def ranking(self, index: Lists, budget: KeyBudget) -> Ranking:
    """Reads the best of the recalled keys, and lists more of them."""
    listed = KeyBudget(self._list_length(budget), index.slots.shape[-1])
    return Ranking(
      budget if self.rerank else None, listed if self.update else None
    )

  def update_of(
    self,
    index: Lists,
    queries: Float[Array, "G D"],
    listed: Int[Array, " R"] | None,
  ) -> tuple[Float[Array, "G D"], Int[Array, " R"] | None]:
    """Makes a centroid of the queries, with its list."""
    return unit(queries).astype(index.centroids.dtype), listed

  def update_index(
    self,
    index: Lists,
    update: tuple[Float[Array, "G D"], Int[Array, " R"] | None],
    real: Bool[Array, ""],
  ) -> PyTree[Array | Entry | None]:
    """Replaces the oldest centroid by the new one."""
    if not self.update:
      return None
    direction, slots = update
    assert slots is not None
    oldest = index.oldest
    # Beyond the end, where nothing is written.
    place = jnp.where(real, oldest, index.slots.shape[0])
    return replace(
      index,
      centroids=Entry(place, direction, axis=1),
      slots=Entry(place, slots),
      size=None,
      # By the row's own size: a short row leaves the places after it empty.
      oldest=jnp.where(real, (oldest + 1) % index.size, oldest),
    )

  def _list_length(self, budget: KeyBudget) -> Int[Array, ""]:
    """Length of this row's lists: rho."""
    return floor_share(budget.num_keys, self.list_ratio)

  def _most_centroids(self, length: int) -> int:
    """Number of centroids of a row that fills the padded prompt."""
    count = self.centroids or min(_MAX_CENTROIDS, length // 16)
    return min(max(count, 1), length)

  def _centroid_indices(
    self, prompt: Prompt
  ) -> tuple[Int[Array, " C"], Int[Array, ""]]:
    """Indices of the queries that become centroids, and how many there are.

    Later indices are arbitrary.
    """
    tokens = jnp.max(prompt.head.query_positions) + 1
    size = jnp.full((), self.centroids, jnp.int32)
    if not self.centroids:
      size = jnp.minimum(_MAX_CENTROIDS, tokens // 16)
    size = jnp.clip(size, 1, jnp.maximum(tokens, 1))
    return self._choose(prompt, tokens, size), size

  def _choose(
    self, prompt: Prompt, tokens: Int[Array, ""], size: Int[Array, ""]
  ) -> Int[Array, " C"]:
    """Indices of the queries that become centroids, ascending.

    Args:
      prompt: one KV head of the prompt.
      tokens: length of the row.
      size: number of centroids; later entries of the result are arbitrary.
    """
    positions = prompt.head.query_positions
    length = len(positions)
    number = jnp.arange(length, dtype=jnp.int32)
    if self.choice == "final":
      # The queries are `num_queries` already.
      held = jnp.sum(positions >= 0, dtype=jnp.int32)
      return jnp.clip(held - size + number, 0, length - 1)
    if self.choice == "init":
      chosen = number
    elif self.choice == "equi":
      # In floats: the product of two lengths may not fit an int32.
      share = (number.astype(jnp.float32) + 0.5) / size.astype(jnp.float32)
      chosen = jnp.floor(share * tokens.astype(jnp.float32)).astype(jnp.int32)
    else:
      key = prompt.key(self.seed)
      # A draw by the number of each token, which padding does not change.
      keys = jax.vmap(jax.random.fold_in, (None, 0))(key, number)
      draws = jax.vmap(lambda one: jax.random.uniform(one, (), jnp.float32))(
        keys
      )
      lowest = jnp.where(number < tokens, -draws, -jnp.inf)
      chosen = largest(lowest, size, length)
    chosen = chosen[: self._most_centroids(length)]
    return jnp.clip(chosen, 0, length - 1)

  def _build_lists(
    self,
    prompt: Prompt,
    queries: Float[Array, "G C D"],
    indices: Int[Array, " C"],
    budget: KeyBudget,
  ) -> Int[Array, "C R"]:
    """Lists the keys that each of some queries attends to most.

    Args:
      prompt: one KV head of the prompt.
      queries: the queries.
      indices: their indices among those of the prompt.
      budget: how many keys `retrieve` will return.

    Returns:
      Numbers of the keys, as in `Lists.slots`.
    """
    head = prompt.head
    max_length = math.floor(exact_share(self.list_ratio) * budget.max_keys)
    # With a ring, later lists also hold tokens that are not stored yet, so a
    # short prompt does not limit their length.
    if not self.ring_size:
      max_length = min(max_length, prompt.end - prompt.start)
    on_cpu = target_platform() == "cpu"
    logits = _CPU_LOGITS if on_cpu else _LOGITS // prompt.together
    tile = max(1, logits // head.positions.shape[0])
    list_length = self._list_length(budget)
    keys, numbers = head.keys, self._numbers(prompt)

    def rank_keys(
      centroid: tuple[Float[Array, "G D"], Int[Array, ""]],
    ) -> Int[Array, " R"]:
      query, position = centroid
      ranked = head.valid
      if self.causal:
        ranked = ranked & (head.positions <= position)
      scores = max_attention(query, keys, ranked)
      if self.mask == "before":
        scores = jnp.where(numbers >= 0, scores, -jnp.inf)
      slots = largest(scores, list_length, max_length)
      return jnp.where(slots >= 0, numbers[slots], -1)

    # In tiles, as logits of all centroids and keys would not fit into memory.
    lists: Int[Array, "C R"] = jax.lax.map(
      rank_keys,
      (jnp.swapaxes(queries, 0, 1), head.query_positions[indices]),
      batch_size=min(tile, len(indices)),
    )
    return lists

  def _numbers(self, prompt: Prompt) -> Int[Array, " T"]:
    """Number of each slot in the lists; -1 for slots that are not listed."""
    slots = prompt.retrievable.shape[0]
    number = jnp.arange(slots, dtype=jnp.int32) - prompt.start
    stored = jnp.where(prompt.retrievable, number, -1)
    if not self.ring_size:
      return stored
    # Resident tokens after them continue the numbers of the stored tokens.
    empty = (
      prompt.end - prompt.start - jnp.sum(prompt.retrievable, dtype=jnp.int32)
    )
    # Late slots begin at `end`, but a short row's retrievable slots end before
    # it: numbers skip that gap.
    pending = prompt.head.valid & (number >= 0) & ~prompt.retrievable
    return jnp.where(pending, number + empty, stored)

  def _recall(
    self, index: Lists, direction: Float[Array, "G D"]
  ) -> Int[Array, " M"]:
    """Returns the lists of the nearest centroids, concatenated."""
    centroids = index.centroids.astype(jnp.float32)
    near = jnp.max(jnp.einsum("gcd,gd->gc", centroids, direction), axis=0)
    real = jnp.arange(near.shape[0], dtype=jnp.int32) < index.size
    probes = min(self.probes, index.slots.shape[0])
    near = jnp.where(real, near, -jnp.inf)
    lists = largest(near, jnp.asarray(probes, jnp.int32), probes)
    return jnp.where(lists[:, None] >= 0, index.slots[lists], -1).reshape(-1)


def _listed(
  candidates: Int[Array, " U"], order: Int[Array, " M"]
) -> Int[Array, " M"]:
  """The candidates at these places; -1 for place -1."""
  return jnp.where(order >= 0, candidates[order], -1)
