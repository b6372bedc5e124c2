"""What attention differs in from layer to layer of open models."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
  """Options of the attention of a layer; by default it is plain.

  Attributes:
    window: a query at position p sees keys at positions above p - window
      alone, as in Hugging Face's models; None for no bound.
    scale: of the logits; None for D^-1/2, D the width of keys.
    softcap: scaled logits become softcap * tanh(logits / softcap); None
      leaves them as they are.
  """

  window: int | None = None
  scale: float | None = None
  softcap: float | None = None

  def __post_init__(self) -> None:
    if self.window is not None and self.window < 1:
      raise ValueError(f"window must be at least 1, not {self.window}.")
    for name in ("scale", "softcap"):
      value = getattr(self, name)
      if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}.")

  def scale_of(self, dim: int) -> float:
    """The factor of the products of queries and keys.

    Args:
      dim: D, the width of keys.
    """
    return dim**-0.5 if self.scale is None else self.scale

  def rescale(self, queries: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Queries whose products with keys, times D^-1/2, are the scaled logits."""
    dim = queries.shape[-1]
    if self.scale is None:
      return queries
    return queries * (self.scale_of(dim) * dim**0.5)

  def capped(self, logits: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Scaled logits, after the cap if there is one."""
    if self.softcap is None:
      return logits
    return self.softcap * jnp.tanh(logits / self.softcap)

  def seen(
    self, query_positions: Int[Array, "*Q"], key_positions: Int[Array, "*K"]
  ) -> Bool[Array, "*S"]:
    """Which queries see which keys, if there are any there.

    Args:
      query_positions: place of each query in its row.
      key_positions: place of each key in its row; the shapes broadcast.
    """
    causal = key_positions <= query_positions
    if self.window is None:
      return causal
    return causal & (query_positions - key_positions < self.window)


PLAIN = AttentionOptions()


def decline_unless_plain(
  options: AttentionOptions,
  dim: int,
  value_dim: int | None = None,
  sinks: Float[Array, " N"] | None = None,
) -> None:
  """For kernels that know plain attention alone.

  Args:
    options: of the attention; a scale that equals D^-1/2 is plain.
    dim: D, the width of keys.
    value_dim: the width of values.
    sinks: logits of sinks.

  Raises:
    NotImplementedError: something is not plain.
  """
  scale = options.scale_of(dim)
  reasons = {
    "a window": options.window is not None,
    f"logits scaled by {scale:g}": not math.isclose(scale, dim**-0.5),
    "capped logits": options.softcap is not None,
    "sinks": sinks is not None,
    f"keys of {dim} and values of {value_dim} entries": value_dim
    not in (None, dim),
  }
  found = [reason for reason, applies in reasons.items() if applies]
  if found:
    raise NotImplementedError(f"There is no kernel for {', '.join(found)}.")
