"""What a retrieval method is: everything is kept and a little of it is read."""

import abc
import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from kvjax.errors import InputError
from kvjax.heads import Head
from kvjax.kernels.select import largest, named_slots, true_slots
from kvjax.options.bounds import check_choices, check_least
from kvjax.options.budgets import Budget
from kvjax.struct import static, struct

Turn = Literal["decode", "dense"]
KeysRead = Literal["all", "candidates", "none"]


@struct
class Reads:
  """How many keys one KV head looks up per token.

  Attributes:
    count: of this row.
    most: of any row of the batch.
  """

  count: Int[Array, "*B"]
  most: int = static()


@struct
class Prompt:
  """One KV head of a prompt, some of whose tokens are to be looked up.

  Attributes:
    head: all tokens that the cache holds, and the prompt's queries.
    lookup: slots of the tokens that may be looked up; all of them lie from
      `start` up to `end`, and an index numbers them from `start` on.
    number: of the KV head in its layer.
    layer: number of the layer.
    start: the first such slot.
    end: behind the last.
  """

  head: Head
  lookup: Bool[Array, "*B T"]
  number: Int[Array, "*B"]
  layer: Int[Array, "*B"] | int
  start: int = static()
  end: int = static()

  def key(self, seed: int) -> PRNGKeyArray:
    """For random draws; its own for every layer and KV head."""
    layer = jax.random.fold_in(jax.random.key(seed), self.layer)
    return jax.random.fold_in(layer, self.number)

  @property
  def stored_keys(self) -> Float[Array, "*B F D"]:
    """Float32 keys that may be looked up; zero where there is none."""
    keys = self.head.keys[..., self.start : self.end, :]
    return jnp.where(self.stored[..., None], keys, 0.0)

  @property
  def stored(self) -> Bool[Array, "*B F"]:
    """Which of the numbered slots may be looked up."""
    return self.lookup[..., self.start : self.end]


@struct
class Waiting:
  """One KV head's resident tokens that will be looked up one day.

  Attributes:
    keys: float32 keys; zero where there is none.
    numbers: which number each has, here and as long as it is stored; -1 for
      none, or one that the query does not see.
  """

  keys: Float[Array, "*B W D"]
  numbers: Int[Array, "*B W"]


@struct
class Candidates:
  """Keys that a method may choose among.

  Attributes:
    slots: where they are stored; -1 for none.
    keys: float32 keys; zero where there is none.
  """

  slots: Int[Array, "*B U"]
  keys: Float[Array, "*B U D"]


@struct
class Store:
  """One KV head's keys that may be looked up.

  An index may name a slot of the prompt, and those tokens that come later by
  numbers that they have before they are stored.

  Attributes:
    keys: rotated keys in the cache's dtype, of a method that reads all of
      them; an empty slot holds anything.
    valid: which slots hold a token.
    later: the numbers of the last E slots, where tokens come to them after the
      prompt; of a slot before them the number is its place.
    waiting: tokens that will come.
    candidates: keys of the slots that the method has named as such.
  """

  keys: Float[Array, "*B F D"] | None
  valid: Bool[Array, "*B F"]
  later: Int[Array, "*B E"] | None = None
  waiting: Waiting | None = None
  candidates: Candidates | None = None

  def slots(self, numbers: Int[Array, " M"]) -> Int[Array, " U"]:
    """Slots of what is stored of these numbers: ascending, once each, then -1.

    U is M, or F where that is less.
    """
    slots = self.valid.shape[0]
    named = named_slots(numbers, slots)
    if self.later is not None:
      first = slots - self.later.shape[0]
      later = named[self.later] & self.valid[first:]
      named = jnp.concatenate([named[:first], later])
    return true_slots(named, min(numbers.shape[0], slots))

  def numbers(self, slots: Int[Array, " M"]) -> Int[Array, " M"]:
    """The inverse, for each slot; -1 for slot -1."""
    if self.later is None:
      return slots
    first = self.valid.shape[0] - self.later.shape[0]
    later = self.later[jnp.maximum(slots - first, 0)]
    return jnp.where(slots < first, slots, later)


@struct
class Found:
  """What a KV head's queries look up.

  Attributes:
    slots: one list for all of them, or one for each; no slot twice in a list,
      -1 for none.
    bias: added to the scaled logits of what is listed, where it is not zero.
  """

  slots: Int[Array, "*B J M"]
  bias: Float[Array, "*B G M"] | None = None

  @property
  def read_slots(self) -> Int[Array, "*B J M"]:
    """The slots, but -1 for what the bias hides from all heads."""
    if self.bias is None:
      return self.slots
    read = jnp.any(jnp.isfinite(self.bias), axis=-2, keepdims=True)
    return jnp.where(read, self.slots, -1)


@dataclasses.dataclass(frozen=True)
class Retrieval(abc.ABC):
  """Keeps a whole prompt and reads for each token what it looks up.

  A retrieval method is a hashable value: its fields are its hyper-parameters.
  The first and the last tokens of the prompt and all that comes after it, or
  the newest of both, are resident: every token attends to them. The others are
  stored; `index`
  prepares them when the prompt is known, and `retrieve` names those that a
  token reads. Both are functions of one KV head of one row.

  Attributes:
    sinks: first tokens of the prompt that are resident.
    local: last tokens of the prompt that are resident.
    turn: whether the tokens of a question look up one by one, as "decode"d
      tokens do, or attend "dense"ly to everything.
    dense_layers: layers without an index, which attend to everything.
    reads: keys looked up per token, whatever the budget says; 0 for the budget.
    offload: stored keys and values live in the host's memory, where the
      backend has such; see `kvjax.placement`.
  """

  # Which stored keys `retrieve` is given: every one of them, those that
  # `candidates` names, or none, where the index says enough.
  reads_keys: ClassVar[KeysRead] = "all"

  sinks: int = 4
  local: int = 64
  turn: Turn = "decode"
  dense_layers: tuple[int, ...] = ()
  reads: int = 0
  offload: bool = False

  def __post_init__(self) -> None:
    check_choices(self)
    check_least(self, sinks=0, local=0, reads=0)
    if any(layer < 0 for layer in self.dense_layers):
      raise InputError("dense_layers are numbers of layers, 0 for the first.")

  def count(self, budget: Budget, length: int) -> int:
    """Keys that a token looks up in a row of `length` tokens."""
    return min(self.reads, length) if self.reads else budget.kept(length)

  def is_dense(self, layer: int) -> bool:
    """Whether a layer attends to everything."""
    return layer in self.dense_layers

  @property
  def latest_range(self) -> tuple[int, int]:
    """The fewest and the most that `latest` answers."""
    return self.local, self.local

  def latest(self, length: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """How many of the last tokens of a prompt of this length are resident."""
    return jnp.full(length.shape, self.local, jnp.int32)

  @property
  def ring(self) -> int:
    """Places of resident tokens beside the sinks; 0 for as many as come.

    The oldest is stored when a new one comes and all places are taken.
    """
    return 0

  @abc.abstractmethod
  def index(self, prompt: Prompt, reads: Reads) -> PyTree[Array]:
    """What looking up takes, besides the keys."""

  def candidates(
    self, index: PyTree[Array], queries: Float[Array, "G D"], store: Store
  ) -> Int[Array, " U"]:
    """Slots whose keys `retrieve` is given, if it reads "candidates".

    They are copied from where the keys live, the host maybe, and no others.

    Args:
      index: see `retrieve`.
      queries: likewise.
      store: what holds tokens; without keys.

    Returns:
      Slots; -1 for none.
    """
    raise NotImplementedError(f"{type(self).__name__} names no candidates.")

  @abc.abstractmethod
  def retrieve(
    self,
    index: PyTree[Array],
    queries: Float[Array, "G D"],
    store: Store,
    reads: Reads,
  ) -> tuple[Found, PyTree[Array]]:
    """What a token reads.

    Args:
      index: what `index` prepared or `updated` made of it.
      queries: the token's float32 queries of the heads that read this KV head.
      store: the keys that `reads_keys` asks for.
      reads: how many to look up.

    Returns:
      What is found, and what `updated` makes of it.
    """

  def updated(
    self,
    index: PyTree[Array],
    news: PyTree[Array],
    real: Bool[Array, ""],
  ) -> PyTree[Array]:
    """The index after a token, whose lookup answered `news`.

    Args:
      index: as it was.
      news: what `retrieve` answered beside what it found.
      real: false for padding, which changes nothing.
    """
    del news, real
    return index


def best_slots(
  scores: Float[Array, "*B F"], valid: Bool[Array, "*B F"], reads: Reads
) -> Int[Array, "*B M"]:
  """The held slots of the highest scores, in ascending order, then -1.

  Equal scores prefer the lower slot.
  """
  most = min(reads.most, scores.shape[-1])
  scores = jnp.where(valid, scores, -jnp.inf)
  return largest(scores, reads.count, most)


def attention_worth(
  queries: Float[Array, "G D"],
  keys: Float[Array, "T D"],
  seen: Bool[Array, " T"],
) -> Float[Array, " T"]:
  """The most that any head attends to each key; -inf for keys not seen.

  Softmax of the scaled logits over the keys that are seen, all in float32.
  """
  logits = queries @ keys.T * queries.shape[-1] ** -0.5
  weights = jax.nn.softmax(logits, axis=-1, where=seen)
  return jnp.where(seen, jnp.max(weights, axis=0), -jnp.inf)
