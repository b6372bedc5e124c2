"""Rotary position embeddings; `rope_fields` reads them from a config.json."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.errors import InputError
from kvjax.models.rope_kinds import FREQUENCIES

# Cosines and sines of R angles.
Tables = tuple[Float[Array, "B S R"], Float[Array, "B S R"]]
# The frequencies of these kinds depend on the length of the row.
_BY_LENGTH = ("dynamic", "longrope")


@dataclasses.dataclass(frozen=True)
class Rope:
  """A rotary embedding.

  Attributes:
    kind: a key of `kvjax.models.rope_kinds.FREQUENCIES`.
    theta: base of the frequencies.
    dim: number of rotated channels of a head, the first ones; even.
    original_context: context in tokens before any scaling.
    scaling: the other fields, as sorted pairs.
    interleaved: whether pairs are neighboring channels (2i, 2i + 1) instead of
      (i, i + dim / 2).
  """

  kind: str
  theta: float
  dim: int
  original_context: int
  scaling: tuple[tuple[str, Any], ...] = ()
  interleaved: bool = False

  def to_hf(self) -> dict[str, Any]:
    """Returns the fields that `kvjax.models.rope_fields.read_rope` reads."""
    if self.kind == "default":
      return {"rope_theta": self.theta}
    scaling = {"rope_type": self.kind, **dict(self.scaling)}
    return {"rope_theta": self.theta, "rope_scaling": scaling}

  def parameters(self) -> dict[str, Any]:
    """Returns the same as one object of transformers' `rope_parameters`."""
    kind = {"rope_type": self.kind, "rope_theta": self.theta}
    return kind | dict(self.scaling)

  def max_context(self, max_positions: int) -> int:
    """Maximum context length with scaling."""
    if self.kind in ("default", "llama3", "longrope"):
      return max_positions
    factor = dict(self.scaling)["factor"]
    return max(max_positions, int(self.original_context * factor))

  def tables(self, positions: Int[Array, "B S"]) -> Tables:
    """Computes float32 cosines and sines of every position's angles.

    Those of padding (position -1) are finite and arbitrary. The dynamic kind
    and longrope scale each row by its length.
    """
    clipped = jnp.maximum(positions, 0)
    frequencies, scale = FREQUENCIES[self.kind](self, clipped)
    angles = clipped.astype(jnp.float32)[:, :, None] * frequencies[:, None, :]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale

  def rotate(
    self, x: Float[Array, "B H S D"], tables: Tables
  ) -> Float[Array, "B H S D"]:
    """Rotates the pairs of every head; see `rotate`."""
    return rotate(x, *tables, interleaved=self.interleaved)

  def rerotate(
    self, keys: Float[Array, "B K T D"], by: Int[Array, "B K T"]
  ) -> Float[Array, "B K T D"]:
    """Moves keys that were rotated at positions p to p + `by`.

    Raises:
      InputError: the angles depend on the row's length (dynamic, longrope).
    """
    if self.kind in _BY_LENGTH:
      raise InputError(
        f"Keys of a {self.kind} rotary embedding cannot be moved to other "
        "places: their angles depend on the length of the row."
      )
    # Without the scale of yarn, which the keys have from their first rotation.
    frequencies, _ = FREQUENCIES[self.kind](self, by[:, 0])
    # Rows and heads stay two axes: as one, devices would gather the heads.
    angles = by.astype(jnp.float32)[..., None] * frequencies[:, None, None]
    return _turn(keys, jnp.cos(angles), jnp.sin(angles), self.interleaved)


def rotate(
  x: Float[Array, "B H S D"],
  cos: Float[Array, "B S R"],
  sin: Float[Array, "B S R"],
  interleaved: bool = False,
) -> Float[Array, "B H S D"]:
  """Rotates pairs of channels of every head; computed in float32.

  Args:
    x: the heads; only their first 2 R channels are rotated.
    cos: cosines of the R pairs.
    sin: sines.
    interleaved: pairs are (2i, 2i + 1) instead of (i, i + R).
  """
  return _turn(x, cos[:, None], sin[:, None], interleaved)


def _turn(
  x: Float[Array, "B H S D"],
  cos: Float[Array, " B #H S R"],
  sin: Float[Array, " B #H S R"],
  interleaved: bool,
) -> Float[Array, "B H S D"]:
  """Rotates pairs of channels, in each head by angles of its own; `rotate`."""
  width = 2 * cos.shape[-1]
  turned = x[..., :width].astype(jnp.float32)
  if interleaved:
    low, high = turned[..., ::2], turned[..., 1::2]
  else:
    low, high = jnp.split(turned, 2, axis=-1)
  rotated = (low * cos - high * sin, high * cos + low * sin)
  if interleaved:
    turned = jnp.stack(rotated, axis=-1).reshape(turned.shape)
  else:
    turned = jnp.concatenate(rotated, axis=-1)
  turned = turned.astype(x.dtype)
  if width == x.shape[-1]:
    return turned
  return jnp.concatenate([turned, x[..., width:]], axis=-1)
