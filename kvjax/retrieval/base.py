"""The interface of retrieval methods, which keep all keys and read a few."""

import abc
import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from kvjax.heads import Head
from kvjax.kernels.select import mask_to_slots, slots_to_mask
from kvjax.options.bounds import check_layers, check_least, check_options
from kvjax.options.budgets import Budget
from kvjax.struct import static, struct

Turn = Literal["decode", "dense"]
KeyAccess = Literal["all", "candidates", "none"]


@struct
class KeyBudget:
  """How many keys one KV head retrieves per token.

  Attributes:
    num_keys: for this row.
    max_keys: for any row of the batch.
  """

  num_keys: Int[Array, "*B"]
  max_keys: int = static()


@struct
class Prompt:
  """One KV head of a prompt that is to be indexed.

  Attributes:
    head: all tokens in the cache, and the prompt's last queries, as many as
      `Retrieval.num_queries` says.
    retrievable: slots of the tokens that may be retrieved. All of them lie
      between `start` and `end`; an index numbers them from `start` on.
    number: index of the KV head in its layer.
    layer: index of the layer.
    start: first retrievable slot.
    end: one past the last retrievable slot.
    together: number of heads of all rows that are indexed at the same time.
  """

  head: Head
  retrievable: Bool[Array, "*B T"]
  number: Int[Array, "*B"]
  layer: Int[Array, "*B"] | int
  start: int = static()
  end: int = static()
  together: int = static(default=1)

  def key(self, seed: int) -> PRNGKeyArray:
    """A random key that differs between layers and KV heads."""
    # Without the row: what is drawn must not depend on the batch.
    layer = jax.random.fold_in(jax.random.key(seed), self.layer)
    return jax.random.fold_in(layer, self.number)

  @property
  def stored_keys(self) -> Float[Array, "*B F D"]:
    """Float32 keys that may be retrieved; zero where a slot is empty."""
    keys = self.head.keys[..., self.start : self.end, :]
    return jnp.where(self.stored[..., None], keys, 0.0)

  @property
  def stored(self) -> Bool[Array, "*B F"]:
    """Mask of the numbered slots that may be retrieved."""
    return self.retrievable[..., self.start : self.end]


@struct
class PendingKeys:
  """Resident tokens of one KV head that will be stored later.

  Attributes:
    keys: float32 keys; zero where there is none.
    numbers: number of each token, now and once it is stored; -1 for none, or
      for a token that is not visible to the query.
  """

  keys: Float[Array, "*B W D"]
  numbers: Int[Array, "*B W"]


@struct
class Candidates:
  """Keys that a method may select from.

  Attributes:
    slots: stored slot of each key; -1 for none.
    logits: float32 products of the keys with the token's queries, times D^-1/2;
      -inf where there is no key. They are computed where the keys are, which
      may be the host.
  """

  slots: Int[Array, "*B U"]
  logits: Float[Array, "*B G U"]


@struct
class Ranking:
  """What a method does with candidates that it only ranks.

  They are ranked by `kvjax.retrieval.weights.max_weights`: the maximum over the
  heads of the softmax of their logits.

  Attributes:
    attended: how many of the best a token attends to; None for all candidates.
    listed: how many of the best the update names; None if it names none.
  """

  attended: KeyBudget | None
  listed: KeyBudget | None


@struct
class Store:
  """The stored keys of one KV head.

  An index refers to tokens by number. The number of a prompt token is its
  slot. A token that is stored after the prompt gets its number earlier, while
  it is still resident.

  Attributes:
    keys: rotated keys in the cache's dtype, for methods that read all of them;
      the contents of empty slots are arbitrary.
    valid: mask of the slots that contain a token: the first ones, and any of
      the last E.
    late_numbers: numbers of the last E slots, which are filled after the
      prompt; None if there are no such slots.
    pending: resident tokens that will be stored later.
    candidates: the slots that `Retrieval.candidates` returned.
  """

  keys: Float[Array, "*B F D"] | None
  valid: Bool[Array, "*B F"]
  late_numbers: Int[Array, "*B E"] | None = None
  pending: PendingKeys | None = None
  candidates: Candidates | None = None

  def list_all(self, size: int) -> Int[Array, "*B M"]:
    """Lists the first `size` slots that contain a token, then -1."""
    if self.late_numbers is not None:
      return mask_to_slots(self.valid, size)
    # Without late slots, valid ones are the first, and no search is needed.
    count = jnp.sum(self.valid, axis=-1, keepdims=True, dtype=jnp.int32)
    slots = jnp.arange(size, dtype=jnp.int32)
    return jnp.where(slots < count, slots, -1)

  def slots(self, numbers: Int[Array, " M"]) -> Int[Array, " U"]:
    """Returns the stored slots with these numbers.

    They are unique and ascending, then -1. U is min(M, F).
    """
    slots = self.valid.shape[0]
    # The mask removes duplicates. Prompt tokens have their slots as numbers.
    named = slots_to_mask(numbers, slots)
    if self.late_numbers is not None:
      first = slots - self.late_numbers.shape[0]
      # Empty late slots have arbitrary numbers. The late part of `named` is by
      # number, and numbers of tokens that are still resident drop out here.
      late = named[self.late_numbers] & self.valid[first:]
      named = jnp.concatenate([named[:first], late])
    return mask_to_slots(named, min(numbers.shape[0], slots))

  def numbers(self, slots: Int[Array, " M"]) -> Int[Array, " M"]:
    """Returns the number of each slot; -1 for slot -1."""
    if self.late_numbers is None:
      return slots
    first = self.valid.shape[0] - self.late_numbers.shape[0]
    late = self.late_numbers[jnp.maximum(slots - first, 0)]
    return jnp.where(slots < first, slots, late)


@struct
class Entry:
  """A new entry of an array of an index.

  Attributes:
    place: where it goes along the axis; nothing is written beyond its end.
    value: the entry, without the axis.
    axis: the axis, 0 for the first of the array of one KV head.
  """

  place: Int[Array, "*B"]
  value: Shaped[Array, "*E"]
  axis: int = static(default=0)


@struct
class Selection:
  """The slots that the queries of one KV head retrieve.

  Attributes:
    slots: one list shared by all queries, or one list per query; slots are
      unique within a list, -1 for none.
    bias: added to the scaled logits of the listed slots; None for zero.
    page: number of entries per page: they come in groups of `page`, the slots
      of one page in order, any of which may be -1. Pages start at multiples of
      their size and end within the stored slots.
    logits: float32 products of the listed keys with the token's queries, times
      D^-1/2, from `Candidates.logits`; arbitrary for -1. With them, the keys
      need not be read again. None if they are not known.
  """

  slots: Int[Array, "*B J M"]
  bias: Float[Array, "*B G M"] | None = None
  page: int = static(default=1)
  logits: Float[Array, "*B G M"] | None = None

  @property
  def visible_slots(self) -> Int[Array, "*B J M"]:
    """The slots, with -1 for those that the bias hides from all heads."""
    if self.bias is None:
      return self.slots
    visible = jnp.any(jnp.isfinite(self.bias), axis=-2, keepdims=True)
    return jnp.where(visible, self.slots, -1)


@dataclasses.dataclass(frozen=True)
class Retrieval(abc.ABC):
  """Keeps the whole prompt and retrieves a few of its keys for each token.

  A retrieval method is a hashable value: its fields are its hyperparameters.
  Every token attends to the resident tokens: the first and the last tokens of
  the prompt, and the tokens after it (or only the newest of these). All other
  tokens are stored. `index` builds the index once the prompt is known, and
  `retrieve` selects the stored keys that a token attends to. Both are functions
  of one KV head of one row.

  Attributes:
    sinks: first tokens of the prompt that are resident.
    local: last tokens of the prompt that are resident.
    turn: "decode" retrieves for the tokens of a question one by one, as for
      decoded tokens; "dense" lets them attend to everything.
    dense_layers: layers without an index, which attend to everything.
    keys: keys retrieved per token, whatever the budget; 0 uses the budget.
    offload: keep stored keys and values in host memory, if the backend
      supports it; see `kvjax.placement`.
  """

  # Stored keys that `retrieve` compares with the queries: all of them, those
  # that `candidates` returns, or none, where the index is sufficient.
  key_access: ClassVar[KeyAccess] = "all"

  sinks: int = 4
  local: int = 64
  turn: Turn = "decode"
  dense_layers: tuple[int, ...] = ()
  keys: int = 0
  offload: bool = False

  def __post_init__(self) -> None:
    check_options(self)
    check_least(self, sinks=0, local=0, keys=0)
    check_layers(self, "dense_layers")

  def num_keys(self, budget: Budget, length: int) -> int:
    """Keys that a token retrieves in a row of `length` tokens."""
    return min(self.keys, length) if self.keys else budget.num_kept(length)

  def is_dense(self, layer: int) -> bool:
    """Whether a layer attends to everything."""
    return layer in self.dense_layers

  @property
  def local_range(self) -> tuple[int, int]:
    """Lower and upper bound of `num_local`."""
    return self.local, self.local

  def num_local(self, length: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """Number of resident last tokens in a prompt of this length."""
    return jnp.full(length.shape, self.local, jnp.int32)

  def num_queries(self, length: int) -> int | None:
    """Number of last queries that `index` reads; None, the default, for all.

    A prefill does not hold the others. Override it together with `index`.

    Args:
      length: S, length of the padded prompt.
    """
    del length
    return None

  @property
  def ring_size(self) -> int:
    """Places for resident tokens besides the sinks; 0 for no limit.

    With a limit, a new token moves the oldest one to the stored tokens once all
    places are taken.
    """
    return 0

  @abc.abstractmethod
  def index(self, prompt: Prompt, budget: KeyBudget) -> PyTree[Array]:
    """Builds the index of a prompt.

    Args:
      prompt: one KV head of it.
      budget: how many keys `retrieve` will return.

    Returns:
      Whatever `retrieve` needs besides the keys. A cache can be saved if it is
      made of tuples, lists, and dictionaries whose keys are texts.
    """

  def candidates(
    self, index: PyTree[Array], queries: Float[Array, "G D"], store: Store
  ) -> Int[Array, " U"]:
    """Selects the slots whose keys `retrieve` compares with the queries.

    Only called if `key_access` is "candidates". No other keys are read. Where
    the budget allows all stored keys, these replace the candidates, so U must
    be at least the number of stored keys that a budget allows.

    Args:
      index: as for `retrieve`.
      queries: as for `retrieve`.
      store: the stored tokens, without keys.

    Returns:
      Slots, unique and ascending, then -1.
    """
    raise NotImplementedError(f"{type(self).__name__} names no candidates.")

  @abc.abstractmethod
  def retrieve(
    self,
    index: PyTree[Array],
    queries: Float[Array, "G D"],
    store: Store,
    budget: KeyBudget,
  ) -> tuple[Selection, PyTree[Array]]:
    """Selects the stored keys that a token attends to.

    Args:
      index: from `index` or `update_index`.
      queries: float32 queries of the token, one per query head of the group.
      store: the stored tokens, with what `key_access` requests.
      budget: how many keys to select.

    Returns:
      The selection, and an update for `update_index`.
    """

  def ranking(self, index: PyTree[Array], budget: KeyBudget) -> Ranking | None:
    """Returns what `retrieve` does with the candidates, if it only ranks them.

    Where stored keys are in host memory, the host then ranks the candidates and
    attends to the best, and `update_of` is called in place of `retrieve`. With
    None, the default, the device always runs `retrieve`.

    Args:
      index: as for `retrieve`.
      budget: as for `retrieve`.
    """
    del index, budget
    return None

  def update_of(
    self,
    index: PyTree[Array],
    queries: Float[Array, "G D"],
    listed: Int[Array, " R"] | None,
  ) -> PyTree[Array]:
    """Returns the update that `retrieve` returns with these listed candidates.

    Only called if there is a `ranking`.

    Args:
      index: as for `retrieve`.
      queries: as for `retrieve`.
      listed: slots of the best candidates, ascending, then -1.
    """
    raise NotImplementedError(f"{type(self).__name__} ranks no candidates.")

  def update_index(
    self, index: PyTree[Array], update: PyTree[Array], real: Bool[Array, ""]
  ) -> PyTree[Array | Entry | None]:
    """Returns how a token changes the index; by default not at all.

    Args:
      index: the index before the token.
      update: the update that `retrieve` returned for the token.
      real: false for padding, which must not change the index.

    Returns:
      A tree like the index. In place of an array it has an `Entry`, which is
      written without copying the array, or a new array of the same shape and
      dtype; None is for arrays, or whole branches, that do not change.
    """
    del index, update, real
    return None
