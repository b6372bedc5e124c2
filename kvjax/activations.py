"""The projections of a block of tokens in one layer."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from kvjax.cache.row_ends import row_ends
from kvjax.errors import InputError
from kvjax.kernels.attention.options import PLAIN, AttentionOptions
from kvjax.struct import static, struct

# Activations that a method can request besides queries, keys and values.
Optional = Literal[
  "keys_unrotated",
  "queries_unrotated",
  "inputs",
  "output_projection",
  "rerotate",
]
OPTIONAL: tuple[Optional, ...] = (
  "keys_unrotated",
  "queries_unrotated",
  "inputs",
  "output_projection",
  "rerotate",
)
# Moves vectors [B, K, T, D] that were rotated at positions p to p + `by`, where
# `by` is [B, K, T].
Rerotate = Callable[
  [Float[Array, "B K T D"], Int[Array, "B K T"]], Float[Array, "B K T D"]
]


# Fields of `Activations` without an axis of rows, besides `weights`, which the
# engine sets. Where rows run one by one, all others are joined along it.
ROWLESS = ("output_projection", "sinks")


class NotProvidedError(InputError):
  """A method reads activations that a model does not provide.

  Attributes:
    names: their names in `Activations`.
  """

  def __init__(self, names: Sequence[str], reader: str = "A method"):
    super().__init__(
      f"{reader} reads {', '.join(names)}, which this model does not provide; "
      "see kvjax.Activations."
    )
    self.names = names


@struct
class Activations:
  """Projections of a block of S tokens in one layer, as attention uses them.

  The engine keeps those of `OPTIONAL` only if the method's traits request them
  (`Traits.activations`). Otherwise they are None and are not computed.

  Attributes:
    queries: rotated queries; query head j reads KV head j // G. Of whole
      prompts, they are the last Q of each row if nobody reads the others
      (`Traits.queries`); else Q is S.
    keys: rotated keys, as the cache stores them.
    values: values.
    positions: position of each token in its row; -1 for padding.
    keys_unrotated: keys before RoPE, after the model's key norm if any.
    queries_unrotated: queries before RoPE, after the model's query norm if any.
    inputs: the layer's normalized input, which all projections read.
    output_projection: W_O, from each head's attention output to the residual.
    sinks: a logit per query head that is added to the softmax's denominator.
    rerotate: moves vectors of this layer to other positions; the model's,
      unless the layer's block passes its own. Evictions between blocks and
      while decoding always use the model's.
    replayed: score of each token by a replay of the prompt, -1 for tokens that
      are not replayed; given to methods whose traits have a replay.
    weights: what `Method.load` returns, for all layers; set by the engine.
    attention: window, scale and softcap of the layer; set by the engine.
    decoded: whether these are tokens that were decoded, one per row, and not
      those of a prompt or a question; set by the engine.
  """

  queries: Float[Array, "B N Q D"]
  keys: Float[Array, "B K S D"]
  values: Float[Array, "B K S Dv"]
  positions: Int[Array, "B S"]
  keys_unrotated: Float[Array, "B K S D"] | None = None
  queries_unrotated: Float[Array, "B N S D"] | None = None
  inputs: Float[Array, "B S E"] | None = None
  output_projection: Float[Array, "N Dv E"] | None = None
  sinks: Float[Array, " N"] | None = None
  rerotate: Rerotate | None = static(default=None)
  replayed: Float[Array, "B N S"] | None = None
  weights: PyTree[Array] = None
  attention: AttentionOptions = static(default=PLAIN)
  decoded: bool = static(default=False)

  def only(self, names: Collection[str]) -> "Activations":
    """Drops the activations of `OPTIONAL` that are not named.

    Raises:
      NotProvidedError: the model does not supply one that is.
    """
    missing = [
      name for name in OPTIONAL if name in names and not self.has(name)
    ]
    if missing:
      raise NotProvidedError(missing)
    dropped: dict[str, Any] = dict.fromkeys({*OPTIONAL} - {*names})
    return dataclasses.replace(self, **dropped)

  def has(self, name: str) -> bool:
    """Whether an activation that may be None is there."""
    return vars(self)[name] is not None

  @property
  def query_positions(self) -> Int[Array, "B Q"]:
    """Positions of the queries; -1 for padding."""
    _, positions = row_ends((), self.positions, self.queries.shape[2])
    return positions

  def with_queries(self, count: int | None) -> "Activations":
    """Drops all but the last queries of each row, which are most of the memory.

    Args:
      count: number of queries that are left, at most; None for all.
    """
    if count is None or count >= self.queries.shape[2]:
      return self
    if count:
      queries, _ = row_ends(self.queries, self.query_positions, count)
    else:
      # An index would take four times as long, in every layer.
      queries = jax.lax.slice_in_dim(self.queries, 0, 0, axis=2)
    return dataclasses.replace(self, queries=queries)

  def with_kv_heads(self, count: int) -> "Activations":
    """Repeats keys and values for `count` KV heads."""
    times = count // self.keys.shape[1]
    if times == 1:
      return self
    unrotated = self.keys_unrotated
    return dataclasses.replace(
      self,
      # Copies side by side, since query head j reads KV head j // G.
      keys=jnp.repeat(self.keys, times, axis=1),
      values=jnp.repeat(self.values, times, axis=1),
      keys_unrotated=None
      if unrotated is None
      else jnp.repeat(unrotated, times, axis=1),
    )
