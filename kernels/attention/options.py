"""Attention options that differ between the layers of open models."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
  """Attention options of a layer; the defaults are plain attention.

  Attributes:
    window: sliding window; a query at position p attends only to positions
      above p - window, as in Hugging Face's models. None means unlimited.
    scale: multiplies the logits; None means D^-1/2, D the width of keys.
    softcap: scaled logits become softcap * tanh(logits / softcap); None leaves
      them unchanged.
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
    """Returns the factor of the products of queries and keys.

    Args:
      dim: D, the width of keys.
    """
    return dim**-0.5 if self.scale is None else self.scale

  def rescale(self, queries: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Scales queries whose products get a factor of D^-1/2 later."""
    dim = queries.shape[-1]
    if self.scale is None:
      return queries
    return queries * (self.scale_of(dim) * dim**0.5)

  def prescale(
    self, queries: Float[Array, "*B D"]
  ) -> tuple[Float[Array, "*B D"], "AttentionOptions"]:
    """Scales queries rather than their many products, if nothing is rounded.

    Returns:
      The queries, and options without another scale; both unchanged if the
      queries are not float32.
    """
    if queries.dtype != jnp.float32:
      return queries, self
    scale = self.scale_of(queries.shape[-1])
    return queries * scale, dataclasses.replace(self, scale=1.0)

  def cap(self, logits: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Applies the softcap, if there is one, to scaled logits."""
    if self.softcap is None:
      return logits
    return self.softcap * jnp.tanh(logits / self.softcap)

  def visible(
    self, query_positions: Int[Array, "*Q"], key_positions: Int[Array, "*K"]
  ) -> Bool[Array, "*S"]:
    """Computes the causal, windowed attention mask from positions.

    Empty slots (position -1) are not masked here; callers do that.

    Args:
      query_positions: position of each query in its row.
      key_positions: position of each key in its row; the shapes broadcast.
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
  """Declines options that kernels for plain attention do not support.

  Args:
    options: the attention options; a scale that equals D^-1/2 is plain.
    dim: D, the width of keys.
    value_dim: the width of values.
    sinks: logits of attention sinks.

  Raises:
    NotImplementedError: an option is not plain.
  """
  scale = options.scale_of(dim)
  reasons = {
    "a window": options.window is not None,
    # A configured scale may equal D^-1/2 only up to rounding.
    f"logits scaled by {scale:g}": not math.isclose(scale, dim**-0.5),
    "capped logits": options.softcap is not None,
    "sinks": sinks is not None,
    f"keys of {dim} and values of {value_dim} entries": value_dim
    not in (None, dim),
  }
  unsupported = [reason for reason, applies in reasons.items() if applies]
  if unsupported:
    raise NotImplementedError(
      f"There is no kernel for {', '.join(unsupported)}."
    )
