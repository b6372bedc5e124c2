"""What the engine asks of a language model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.errors import InputError
from kvjax.kernels.attention import AttentionOptions

# Given what a layer projects of a block of tokens; returns the attention
# output, before the output projection, and the layer's new state.
Attend = Callable[[Activations], tuple[Float[Array, "B N S Dv"], Any]]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
  """How one layer attends, and what its KV cache holds.

  Layers of equal specs are of one kind: they share compiled programs.

  Raises InputError where a size is below 1 or the heads do not divide.

  Attributes:
    heads: N, query heads.
    kv_heads: K, key/value heads; N is a multiple of K.
    key_dim: D, width of a query and of a key.
    value_dim: width of a value; None for D.
    window: most recent tokens that a query sees, itself included; None for
      all. Such a layer keeps a ring of that many tokens, which no method
      compresses.
    scale: of the logits; None for D^-1/2.
    softcap: c, where logits become c tanh(logits / c).
    sinks: whether every head has a learned logit that only adds to the
      softmax's denominator (`Activations.sinks`).
    cache: whether the layer keeps keys and values at all.
    weights: which of `Model.layer_weights` holds the layer's weights.
  """

  heads: int
  kv_heads: int
  key_dim: int
  value_dim: int | None = None
  window: int | None = None
  scale: float | None = None
  softcap: float | None = None
  sinks: bool = False
  cache: bool = True
  weights: int = 0

  def __post_init__(self) -> None:
    sizes = (self.heads, self.kv_heads, self.key_dim, self.value_dim)
    for size in sizes:
      if size is not None and size < 1:
        raise InputError(f"Sizes of a layer must be 1 or more; {size} is not.")
    try:
      _ = self.attention
    except ValueError as error:
      raise InputError(f"In a layer's spec, {error}") from error
    if self.heads % self.kv_heads:
      raise InputError(
        f"Query heads are a multiple of the KV heads; {self.heads} is no "
        f"multiple of {self.kv_heads}."
      )

  @property
  def value_width(self) -> int:
    """Width of a value."""
    return self.value_dim or self.key_dim

  @property
  def attention(self) -> AttentionOptions:
    """What attention kernels are told."""
    return AttentionOptions(self.window, self.scale, self.softcap)

  @property
  def compressible(self) -> bool:
    """Whether methods choose among the layer's keys and values."""
    return self.cache and self.window is None


@dataclasses.dataclass(frozen=True)
class Geometry:
  """The sizes that a KV cache depends on.

  Attributes:
    layers: one spec per layer, in order.
    max_positions: longest context in tokens that the model was made for.
  """

  layers: tuple[LayerSpec, ...]
  max_positions: int

  @classmethod
  def uniform(
    cls,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_positions: int,
  ) -> "Geometry":
    """L equal layers with full causal attention.

    Args:
      layers: L.
      heads: N.
      kv_heads: K.
      head_dim: D, of keys and values.
      max_positions: longest context in tokens.
    """
    return cls((LayerSpec(heads, kv_heads, head_dim),) * layers, max_positions)

  @property
  def num_layers(self) -> int:
    """L."""
    return len(self.layers)

  @property
  def weight_index(self) -> tuple[int, ...]:
    """For each layer, its index in the stack of weights that its spec names."""
    return ranks([spec.weights for spec in self.layers])


def ranks(ids: Sequence[int]) -> tuple[int, ...]:
  """How many equal ids come before each.

  Example:
    >>> ranks([0, 0, 1, 0, 1])
    (0, 1, 0, 2, 1)
  """
  counts: dict[int, int] = {}
  found = []
  for each in ids:
    found.append(counts.get(each, 0))
    counts[each] = found[-1] + 1
  return tuple(found)


@runtime_checkable
class Model(Protocol):
  """A decoder-only language model as pure functions.

  A model is hashable and holds no arrays: its weights are the pytree `params`
  that every call is given, so that one compiled program serves all of them.
  """

  @property
  def geometry(self) -> Geometry:
    """The sizes that a KV cache depends on."""
    ...

  def embed(
    self,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
  ) -> tuple[Float[Array, "B S E"], PyTree]:
    """Embeds tokens, and computes what all layers share.

    Args:
      params: the weights.
      tokens: token ids.
      positions: each token's place in its own row; -1 marks padding, whose
        outputs mean nothing.

    Returns:
      The hidden states, and arrays that every layer is given: RoPE tables, say.
    """
    ...

  def layer_weights(self, params: PyTree) -> tuple[PyTree, ...]:
    """Weights of the layers, stacked along a leading axis.

    Layers whose weights have the same shapes are one pytree with leaves
    [L', ...]; `LayerSpec.weights` says which of them a layer's are in.
    """
    ...

  def block(
    self,
    weights: PyTree,
    spec: LayerSpec,
    hidden: Float[Array, "B S E"],
    shared: PyTree,
    positions: Int[Array, "B S"],
    attend: Attend,
  ) -> tuple[Float[Array, "B S E"], Any]:
    """Runs one layer over a block of tokens.

    Args:
      weights: of this layer, without the leading axis.
      spec: of this layer.
      hidden: what the layer before returned.
      shared: what `embed` returned.
      positions: as `embed` was given.
      attend: the attention; called once, unless the layer has none.

    Returns:
      The hidden states, and the state that `attend` returned.
    """
    ...

  def normalize(
    self, params: PyTree, hidden: Float[Array, "B S E"]
  ) -> Float[Array, "B S E"]:
    """The final norm."""
    ...

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """Next-token logits in float32, of normalized hidden states."""
    ...


def check_context(
  model: Model, lengths: Int[np.ndarray, " B"], what: str = "The prompt"
) -> None:
  """Refuses rows that are longer than the model's context.

  Raises:
    InputError: one is.
  """
  limit = model.geometry.max_positions
  longest = int(lengths.max())
  if longest > limit:
    raise InputError(
      f"{what} has {longest} tokens; this model's context is {limit}."
    )
