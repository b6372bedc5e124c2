"""What the engine asks of a language model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from kvjax.activations import Activations
from kvjax.errors import InputError

State = TypeVar("State")

# Called once per layer with (layer, that layer's state, activations); answers
# the attention output, before the output projection, and the layer's new state.
Attend = Callable[
  [int, State, Activations], tuple[Float[Array, "B N S D"], State]
]


@dataclasses.dataclass(frozen=True)
class Geometry:
  """The sizes that a KV cache depends on.

  Attributes:
    layers: L, attention layers.
    heads: N, query heads per layer.
    kv_heads: K, key/value heads per layer; N is a multiple of K.
    head_dim: D.
    max_positions: longest context in tokens that the model was made for.
  """

  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  max_positions: int


@runtime_checkable
class Model(Protocol):
  """A decoder-only language model as two pure functions.

  A model is hashable and holds no arrays: its weights are the pytree `params`
  that every call is given, so that one compiled program serves all of them.
  """

  @property
  def geometry(self) -> Geometry:
    """The sizes that a KV cache depends on."""
    ...

  def hidden(
    self,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    states: Sequence[Any],
    attend: Attend[Any],
  ) -> tuple[Float[Array, "B S E"], tuple[Any, ...]]:
    """Runs the layers over a block of tokens.

    Args:
      params: the weights.
      tokens: token ids.
      positions: each token's place in its own row; -1 marks padding, whose
        outputs mean nothing.
      states: one state per layer, handed to `attend`.
      attend: the attention of every layer.

    Returns:
      The hidden states after the final norm, and the layers' new states.
    """
    ...

  def logits(
    self, params: PyTree, hidden: Float[Array, "*B E"]
  ) -> Float[Array, "*B V"]:
    """Next-token logits in float32."""
    ...


def check_context(
  model: Model, lengths: Int[np.ndarray, " B"], what: str = "The prompt"
) -> None:
  """Refuses rows that are longer than the model's context."""
  limit = model.geometry.max_positions
  longest = int(lengths.max())
  if longest > limit:
    raise InputError(
      f"{what} has {longest} tokens; this model's context is {limit}."
    )
