"""The interface of language models."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.errors import InputError
from kvjax.kernels.attention import AttentionOptions
from kvjax.options.bounds import check_count

# Maps the projections of a block of tokens to the attention output, before the
# output projection, and the layer's new state.
Attend = Callable[[Activations], tuple[Float[Array, "B N S Dv"], Any]]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
  """How one layer attends, and the sizes of its KV cache.

  Layers with equal specs share compiled programs.

  Raises InputError if a size is below 1 or `heads` is not a multiple of
  `kv_heads`.

  Attributes:
    heads: N, query heads.
    kv_heads: K, key/value heads; N is a multiple of K.
    key_dim: D, width of a query and of a key.
    value_dim: width of a value; None for D.
    window: number of most recent tokens that a query attends to, including
      itself; None for all. The cache of such a layer is a ring of that many
      tokens, which no method compresses.
    scale: scale of the logits; None for D^-1/2.
    softcap: c; logits become c tanh(logits / c). None for no cap.
    sinks: whether every head has a learned logit that is added to the softmax's
      denominator (`Activations.sinks`).
    cache: whether the layer attends, and so has a KV cache; others, such as
      one with an MLP alone, must not call `attend`.
    weights: index of the stack in `Model.layer_weights` with the layer's
      weights.
    parallel: whether attention adds to the layer's output directly, beside the
      rest of the layer, which reads the same input.

  Examples:
    >>> import kvjax
    >>> kvjax.LayerSpec(
    ...   heads=8, kv_heads=2, key_dim=64, window=128
    ... ).compressible
    False
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
  parallel: bool = False

  def __post_init__(self) -> None:
    check_count("heads of a layer", self.heads)
    check_count("kv_heads of a layer", self.kv_heads)
    check_count("key_dim of a layer", self.key_dim)
    check_count("weights of a layer", self.weights, 0)
    if self.value_dim is not None:
      check_count("value_dim of a layer", self.value_dim)
    if self.window is not None:
      check_count("window of a layer", self.window)
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
    return self.key_dim if self.value_dim is None else self.value_dim

  @property
  def attention(self) -> AttentionOptions:
    """Options of the attention kernels."""
    return AttentionOptions(self.window, self.scale, self.softcap)

  @property
  def compressible(self) -> bool:
    """Whether methods may evict from the layer."""
    return self.cache and self.window is None


@dataclasses.dataclass(frozen=True)
class Geometry:
  """The sizes that a KV cache depends on.

  Raises InputError if no layer has a cache.

  Attributes:
    layers: one spec per layer, in order.
    max_positions: maximum context length in tokens.

  Examples:
    >>> import kvjax
    >>> local = kvjax.LayerSpec(heads=8, kv_heads=2, key_dim=64, window=128)
    >>> full = kvjax.LayerSpec(heads=8, kv_heads=2, key_dim=64)
    >>> kvjax.Geometry((local, local, full), max_positions=4096).num_layers
    3
  """

  layers: tuple[LayerSpec, ...]
  max_positions: int

  def __post_init__(self) -> None:
    layers: Any = self.layers
    if not isinstance(layers, Sequence):
      raise InputError(
        "A geometry takes a tuple of one kvjax.LayerSpec per layer; "
        f"{layers!r:.80} is not one."
      )
    object.__setattr__(self, "layers", tuple(layers))
    check_count("max_positions", self.max_positions)
    if not any(spec.cache for spec in self.layers):
      raise InputError(
        "A model's geometry needs at least one layer that has a cache."
      )

  @classmethod
  def uniform(
    cls,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_positions: int,
  ) -> "Geometry":
    """Makes the geometry of L equal layers with full causal attention.

    Args:
      layers: L.
      heads: N.
      kv_heads: K.
      head_dim: D, of keys and values.
      max_positions: maximum context length in tokens.
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
  """Counts the equal ids before each id.

  Examples:
    >>> from kvjax.model import ranks
    >>> ranks([0, 0, 1, 0, 1])
    (0, 1, 0, 2, 1)
  """
  counts: dict[int, int] = {}
  result = []
  for item in ids:
    result.append(counts.get(item, 0))
    counts[item] = result[-1] + 1
  return tuple(result)


@runtime_checkable
class Model(Protocol):
  """A decoder-only language model as pure functions.

  A model is hashable and contains no arrays. Its weights are the pytree
  `params`, an argument of every function, so that compiled programs do not
  depend on them.
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
    """Embeds tokens and computes what all layers share.

    Where rows run one by one, as long prompts do on TPUs, every layer computes
    anew what its rows need of the latter, which should take little time.

    Args:
      params: the weights.
      tokens: token ids.
      positions: position of each token in its row; -1 for padding, whose
        outputs are arbitrary.

    Returns:
      The hidden states, and arrays for every layer, such as RoPE tables.
    """
    ...

  def layer_weights(self, params: PyTree) -> tuple[PyTree, ...]:
    """Returns the weights of the layers, stacked along a leading axis.

    Layers whose weights have the same shapes are one pytree with leaves
    [L', ...]. `LayerSpec.weights` is the index of a layer's pytree.
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
      weights: weights of this layer, without the leading axis.
      spec: spec of this layer.
      hidden: hidden states after the previous layer.
      shared: the shared arrays that `embed` returned.
      positions: positions of the tokens, as in `embed`.
      attend: the attention; called once, unless the layer has none.

    Returns:
      The hidden states, and the state that `attend` returned.
    """
    ...

  def normalize(
    self, params: PyTree, hidden: Float[Array, "B S E"]
  ) -> Float[Array, "B S E"]:
    """Applies the final norm."""
    ...

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """Computes float32 next-token logits of normalized hidden states."""
    ...


def check_model(model: Any) -> None:
  """Refuses anything but a model, for callers without a static type checker.

  Raises:
    InputError: it is not a kvjax.Model, or is not hashable.
  """
  # A class has the functions of its objects.
  if isinstance(model, type) or not isinstance(model, Model):
    raise InputError(
      "The model is a kvjax.Model, such as lm.model, and lm.params are its "
      f"weights, where lm = kvjax.load(...), not a {type(model).__name__}."
    )
  try:
    hash(model)
  except TypeError as error:
    raise InputError(
      "A kvjax.Model is hashable, as a dataclass with frozen=True is if its "
      f"fields are; this {type(model).__name__} is not: {error}."
    ) from error


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
      f"{what} has {longest} tokens; this model's context is {limit}: shorten "
      "it, or take a model with a longer context."
    )


@runtime_checkable
class Vocabulary(Protocol):
  """An optional property of a `Model`: token ids beyond it are refused."""

  @property
  def vocab_size(self) -> int:
    """Number of token ids that the model embeds."""
    ...


def check_tokens(
  model: Model,
  tokens: Int[Array, "B S"] | Int[np.ndarray, "B S"],
  lengths: Int[np.ndarray, " B"],
) -> None:
  """Refuses token ids that the model does not embed.

  Those on a device are not looked at, nor those of a model that is no
  `Vocabulary`. An id too large would embed as NaN or as another token.

  Raises:
    InputError: one is below 0 or too large.
  """
  if not isinstance(model, Vocabulary) or not isinstance(tokens, np.ndarray):
    return
  real = np.arange(tokens.shape[1])[None] < lengths[:, None]
  wrong = tokens[real & ((tokens < 0) | (tokens >= model.vocab_size))]
  if wrong.size:
    raise InputError(
      f"There is no token {wrong[0]}: this model embeds {model.vocab_size} "
      "tokens, from 0 on."
    )
