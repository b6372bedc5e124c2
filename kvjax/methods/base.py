"""What every eviction method is made of."""

import abc
import dataclasses
from typing import Literal, final, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.budgets import Budget
from kvjax.cache import LayerCache
from kvjax.errors import InputError
from kvjax.selection import top_slots
from kvjax.struct import static, struct


@struct
class Allowance:
  """What a layer may keep.

  Attributes:
    counts: tokens per row and KV head.
    capacity: M, slots of the new cache; at least every count.
    whole: no row has to lose anything.
  """

  counts: Int[Array, " B"]
  capacity: int = static()
  whole: bool = static(default=False)


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
  """Decides which tokens of a layer's cache are kept.

  A method is a hashable value: its fields are its hyper-parameters. It sees
  the cache with the new block already in it, and what the block's attention
  saw. What it finds there is computed once, whatever the number of budgets.
  """

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      check_choice(type(self), field.name, getattr(self, field.name))

  def keeps_all(self, layer: int) -> bool:
    """True where this layer's cache is never compressed."""
    del layer
    return False

  def kept(self, budget: Budget, length: int) -> int:
    """Tokens that a row of `length` tokens keeps."""
    return budget.kept(length)

  def capacity(self, budget: Budget, padded: int) -> int:
    """Most tokens that a row of the bucket of `padded` tokens keeps."""
    return budget.kept(padded)

  def layer_kept(
    self, budget: Budget, length: int, layers: int
  ) -> tuple[int, ...]:
    """Tokens that a row keeps in each layer; here in all the same."""
    return (self.kept(budget, length),) * layers

  def layer_capacities(
    self, budget: Budget, padded: int, layers: int
  ) -> tuple[int, ...]:
    """Most tokens that a row of the bucket keeps in each layer."""
    return (self.capacity(budget, padded),) * layers

  @abc.abstractmethod
  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> PyTree[Array]:
    """What the choice depends on, for every budget alike."""

  @abc.abstractmethod
  def select(
    self, found: PyTree[Array], cache: LayerCache, allowance: Allowance
  ) -> Int[Array, "B K M"]:
    """Slots to keep, ascending, then -1.

    Args:
      found: what `evaluate` answered.
      cache: the candidates.
      allowance: how many.
    """


@dataclasses.dataclass(frozen=True)
class ScoringMethod(Method):
  """A method that keeps the slots of the highest scores."""

  @abc.abstractmethod
  def scores(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K T"]:
    """Float32 worth of every slot; what empty slots get has no effect."""

  def protected(
    self, cache: LayerCache, counts: Int[Array, " B"]
  ) -> Bool[Array, "B K T"]:
    """Slots that stay whatever their score.

    Args:
      cache: the candidates.
      counts: tokens that each row may keep.
    """
    del counts
    return jnp.zeros(cache.positions.shape, bool)

  @final
  def evaluate(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K T"]:
    """The scores."""
    return self.scores(layer, cache, seen)

  @final
  def select(
    self, found: Float[Array, "B K T"], cache: LayerCache, allowance: Allowance
  ) -> Int[Array, "B K M"]:
    """The highest scores beside the protected slots."""
    return top_slots(
      found,
      cache.positions >= 0,
      self.protected(cache, allowance.counts),
      allowance.counts,
      allowance.capacity,
    )


def check_choice(method: type[Method], option: str, value: object) -> None:
  """Refuses a value that is not among those of a `Literal` field."""
  hint = get_type_hints(method)[option]
  if get_origin(hint) is Literal and value not in get_args(hint):
    raise InputError(
      f"{option} must be one of {', '.join(get_args(hint))}; {value!r} is not."
    )


@struct
class Head:
  """What one KV head of one row offers for scoring.

  Attributes:
    cached_keys: rotated keys in the cache's dtype; empty slots hold anything.
    cached_values: values, likewise.
    positions: each token's place in its row, -1 for empty.
    queries: the block's rotated queries of the G heads that read this head.
    query_positions: place of each query, -1 for padding.
    block_keys_unrotated: the block's keys before RoPE; padding holds anything.
  """

  cached_keys: Float[Array, "*B T D"]
  cached_values: Float[Array, "*B T D"]
  positions: Int[Array, "*B T"]
  queries: Float[Array, "*B G S D"]
  query_positions: Int[Array, "*B S"]
  block_keys_unrotated: Float[Array, "*B S D"]

  @property
  def held(self) -> Bool[Array, "*B T"]:
    """Slots that hold a token."""
    return self.positions >= 0

  @property
  def keys(self) -> Float[Array, "*B T D"]:
    """Float32 keys; empty slots are zero."""
    keys = self.cached_keys.astype(jnp.float32)
    return jnp.where(self.held[..., None], keys, 0.0)

  @property
  def values(self) -> Float[Array, "*B T D"]:
    """Float32 values; empty slots are zero."""
    values = self.cached_values.astype(jnp.float32)
    return jnp.where(self.held[..., None], values, 0.0)


@dataclasses.dataclass(frozen=True)
class HeadwiseMethod(ScoringMethod):
  """A method whose score is a function of one head, vmapped over the rest."""

  @abc.abstractmethod
  def score_head(self, head: Head) -> Float[Array, " T"]:
    """Float32 worth of every slot of one head."""

  @final
  def scores(
    self, layer: int, cache: LayerCache, seen: Activations
  ) -> Float[Array, "B K T"]:
    """Vmaps `score_head` over rows and KV heads."""
    del layer
    return jax.vmap(jax.vmap(self.score_head))(heads_of(cache, seen))


def heads_of(cache: LayerCache, seen: Activations) -> Head:
  """All heads of a layer as one tree with leading axes B and K."""
  batch, heads, length, dim = seen.queries.shape
  kv_heads = cache.positions.shape[1]
  grouped = (batch, kv_heads, heads // kv_heads, length, dim)
  return Head(
    cached_keys=cache.keys,
    cached_values=cache.values,
    positions=cache.positions,
    queries=seen.queries.reshape(grouped),
    query_positions=jnp.broadcast_to(
      seen.positions[:, None], (batch, kv_heads, length)
    ),
    block_keys_unrotated=seen.keys_unrotated,
  )


def window_queries(
  head: Head, window: int
) -> tuple[Float[Array, "G W D"], Int[Array, " W"]]:
  """The block's last real queries in float32, and their positions.

  Args:
    head: one head.
    window: how many; all of the block's where it is shorter. Where the row is
      shorter, the rest are zero, with position -1.
  """
  length = head.query_positions.shape[0]
  size = min(window, length)
  real = jnp.sum((head.query_positions >= 0).astype(jnp.int32))
  start = jnp.clip(real - size, 0, length - size)
  take = jax.lax.dynamic_slice_in_dim
  places = take(head.query_positions, start, size, axis=0)
  queries = take(head.queries, start, size, axis=1).astype(jnp.float32)
  return jnp.where((places >= 0)[None, :, None], queries, 0.0), places


def window_attention(head: Head, window: int) -> Float[Array, "G W T"]:
  """Causal softmax weights of the window's queries over all slots.

  Queries that do not exist have zero weights; see `window_queries`.
  """
  queries, places = window_queries(head, window)
  logits = jnp.einsum("gwd,td->gwt", queries, head.keys)
  logits = logits * queries.shape[-1] ** -0.5
  seen = head.held[None] & (head.positions[None] <= places[:, None])
  weights = jax.nn.softmax(logits, axis=-1, where=seen[None])
  return jnp.where(seen[None], weights, 0.0)
