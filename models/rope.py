"""Rotary position embeddings: default, linear, dynamic, llama3 and yarn."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import InputError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

# What each kind reads, and which of it must be there.
_REQUIRED = {
  "default": (),
  "linear": ("factor",),
  "dynamic": ("factor",),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
  "yarn": ("factor",),
}
_OPTIONAL = {
  "default": (),
  "linear": (),
  "dynamic": (),
  "llama3": (),
  "yarn": (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "truncate",
  ),
}


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary embedding of one model.

  Attributes:
    kind: one of `KINDS`.
    theta: base of the frequencies.
    head_dim: D, even.
    original_context: context in tokens before any scaling.
    scaling: the other fields of the file, as sorted pairs.
  """

  kind: str
  theta: float
  head_dim: int
  original_context: int
  scaling: tuple[tuple[str, Any], ...] = ()

  @classmethod
  def from_hf(
    cls, fields: Mapping[str, Any], head_dim: int, max_positions: int
  ) -> "Rope":
    """Reads `rope_parameters` (or rope_scaling with rope_theta).

    Raises:
      InputError: the kind is unknown, or a field is missing or unknown.
    """
    rest = dict(fields)
    kind = rest.pop("rope_type", None) or rest.get("type", "default")
    rest.pop("type", None)
    if kind not in KINDS:
      raise InputError(
        f"config.json has rope type {kind!r}, which is not supported; "
        f"supported are {', '.join(KINDS)}."
      )
    theta = rest.pop("rope_theta", 10000.0)
    _refuse_other_types({"rope_theta": theta})
    if rest.pop("partial_rotary_factor", 1.0) != 1.0:
      raise InputError(
        "config.json rotates a part of each head only "
        "(partial_rotary_factor), which is not supported."
      )
    rest = {k: v for k, v in rest.items() if v is not None}
    _refuse_other_types(rest)
    missing = [name for name in _REQUIRED[kind] if name not in rest]
    if missing:
      raise InputError(
        f"config.json lacks {missing[0]!r}, which rope type {kind!r} needs."
      )
    known = set(_REQUIRED[kind]) | set(_OPTIONAL[kind])
    unknown = sorted(set(rest) - known)
    if unknown:
      raise InputError(
        f"config.json has the rope field {unknown[0]!r}, which rope type "
        f"{kind!r} does not use."
      )
    original = rest.get("original_max_position_embeddings", max_positions)
    return cls(
      kind, float(theta), head_dim, original, tuple(sorted(rest.items()))
    )

  def to_hf(self) -> dict[str, Any]:
    """The fields that `from_hf` reads back, in both spellings in use."""
    if self.kind == "default":
      return {"rope_theta": self.theta}
    scaling = {"rope_type": self.kind, **dict(self.scaling)}
    return {"rope_theta": self.theta, "rope_scaling": scaling}

  def longest_context(self, max_positions: int) -> int:
    """Tokens that the scaling was made for."""
    if self.kind in ("default", "llama3"):
      return max_positions
    factor = dict(self.scaling)["factor"]
    return max(max_positions, int(self.original_context * factor))

  def tables(
    self, positions: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B S R"], Float[Array, "B S R"]]:
    """Float32 cosines and sines of every position's angles.

    Padding (position -1) gets finite values that mean nothing. The dynamic
    kind stretches each row by that row's own length.
    """
    place = jnp.maximum(positions, 0)
    frequencies, scale = _FREQUENCIES[self.kind](self, place)
    angles = place.astype(jnp.float32)[:, :, None] * frequencies[:, None, :]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale

  def turned(
    self, keys: Float[Array, "B K T D"], by: Int[Array, "B K T"]
  ) -> Float[Array, "B K T D"]:
    """Keys rotated at positions p as if they had been at p + `by`.

    Raises:
      InputError: the dynamic kind, whose angles depend on the row's length.
    """
    if self.kind == "dynamic":
      raise InputError(
        "Keys of a dynamic rotary embedding cannot be moved to other places: "
        "their angles depend on the length of the row."
      )
    shift = by.reshape(-1, by.shape[2])
    frequencies, _ = _FREQUENCIES[self.kind](self, shift)
    angles = shift.astype(jnp.float32)[:, :, None] * frequencies[:, None, :]
    flat = keys.reshape(-1, 1, *keys.shape[2:])
    return rotate(flat, jnp.cos(angles), jnp.sin(angles)).reshape(keys.shape)


def _refuse_other_types(fields: Mapping[str, Any]) -> None:
  """Refuses values that no rotary embedding can have."""
  for name, value in fields.items():
    if name == "truncate":
      right, wanted = isinstance(value, bool), "true or false"
    else:
      number = isinstance(value, (int, float)) and not isinstance(value, bool)
      right, wanted = number and value > 0, "a number above 0"
    if not right:
      raise InputError(
        f"config.json has {value!r} for the rope field {name!r}, which must "
        f"be {wanted}."
      )
  low, high = fields.get("low_freq_factor"), fields.get("high_freq_factor")
  if low is not None and high is not None and low >= high:
    raise InputError(
      f"config.json has low_freq_factor {low} and high_freq_factor {high}; "
      "the first must be the smaller."
    )


def rotate(
  x: Float[Array, "B H S D"],
  cos: Float[Array, "B S R"],
  sin: Float[Array, "B S R"],
) -> Float[Array, "B H S D"]:
  """Rotates the pairs (i, i + D/2) of every head; computed in float32."""
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, None], sin[:, None]
  turned = jnp.concatenate(
    [low * cos - high * sin, high * cos + low * sin], axis=-1
  )
  return turned.astype(x.dtype)


def _inverse_frequencies(theta: float, head_dim: int) -> np.ndarray:
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
  return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def _default(rope: Rope, _: Array) -> tuple[Array, float]:
  base = _inverse_frequencies(rope.theta, rope.head_dim)
  return jnp.asarray(base)[None, :], 1.0


def _linear(rope: Rope, _: Array) -> tuple[Array, float]:
  factor = np.float32(dict(rope.scaling)["factor"])
  base = _inverse_frequencies(rope.theta, rope.head_dim)
  return jnp.asarray(base / factor)[None, :], 1.0


def _dynamic(rope: Rope, place: Array) -> tuple[Array, float]:
  """NTK-aware base that grows with the row, once past the original context.

  The length is that up to the end of the block at hand. Keys that are cached
  already keep the base they were rotated with, as in transformers: work in
  blocks differs from work on the whole prompt.
  """
  factor = dict(rope.scaling)["factor"]
  original = rope.original_context
  length = jnp.max(place, axis=1).astype(jnp.float32) + 1.0
  stretch = jnp.maximum(length, original) * (factor / original) - (factor - 1)
  power = rope.head_dim / (rope.head_dim - 2)
  theta = rope.theta * stretch**power
  exponents = jnp.arange(0, rope.head_dim, 2, dtype=jnp.float32)
  exponents = exponents / rope.head_dim
  return 1.0 / theta[:, None] ** exponents[None, :], 1.0


def _llama3(rope: Rope, _: Array) -> tuple[Array, float]:
  """Llama 3.1: slow frequencies divided, fast ones kept, a ramp between."""
  fields = dict(rope.scaling)
  factor = fields["factor"]
  low, high = fields["low_freq_factor"], fields["high_freq_factor"]
  base = _inverse_frequencies(rope.theta, rope.head_dim)
  wavelength = 2 * np.pi / base
  ramp = (rope.original_context / wavelength - low) / (high - low)
  ramp = np.clip(ramp, 0.0, 1.0)
  scaled = (1 - ramp) * base / factor + ramp * base
  return jnp.asarray(scaled.astype(np.float32))[None, :], 1.0


def _yarn(rope: Rope, _: Array) -> tuple[Array, float]:
  """YaRN (arXiv 2309.00071): interpolation by parts and a warmer softmax."""
  fields = dict(rope.scaling)
  factor = fields["factor"]
  half = rope.head_dim // 2

  def dimension(rotations: float) -> float:
    turns = rope.original_context / (rotations * 2 * math.pi)
    return rope.head_dim * math.log(turns) / (2 * math.log(rope.theta))

  low = dimension(fields.get("beta_fast", 32))
  high = dimension(fields.get("beta_slow", 1))
  if fields.get("truncate", True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, rope.head_dim - 1)
  if low == high:
    high += 0.001
  ramp = np.clip((np.arange(half) - low) / (high - low), 0.0, 1.0)
  base = _inverse_frequencies(rope.theta, rope.head_dim)
  scaled = base / factor * ramp + base * (1 - ramp)
  scale = fields.get("attention_factor")
  if scale is None:
    scale = _yarn_attention_factor(factor, fields)
  return jnp.asarray(scaled.astype(np.float32))[None, :], float(scale)


def _yarn_attention_factor(factor: float, fields: Mapping[str, Any]) -> float:
  def mscale(weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

  if fields.get("mscale") and fields.get("mscale_all_dim"):
    return mscale(fields["mscale"]) / mscale(fields["mscale_all_dim"])
  return mscale(1.0)


_FREQUENCIES = {
  "default": _default,
  "linear": _linear,
  "dynamic": _dynamic,
  "llama3": _llama3,
  "yarn": _yarn,
}
