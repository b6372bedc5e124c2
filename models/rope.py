"""Rotary position embeddings: default, linear, dynamic, llama3 and yarn."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import InputError
from kvjax.models.fields import LARGEST, ConfigError, is_number, shown

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
  "default": ("original_max_position_embeddings",),
  "linear": ("original_max_position_embeddings",),
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
_NUMBERS = {"rope_theta", "partial_rotary_factor"}.union(
  *_REQUIRED.values(), *_OPTIONAL.values()
)
# Frequencies are float32.
_HUGE = 1e30
# How the file came about.
_WITHOUT_EFFECT = ("finetuned",)


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
      ConfigError: the kind is unknown, or fields are missing or not what they
        must be.
    """
    rest = {k: v for k, v in fields.items() if v is not None}
    kind = rest.pop("rope_type", None) or rest.get("type", "default")
    for name in ("type", *_WITHOUT_EFFECT):
      rest.pop(name, None)
    if not isinstance(kind, str) or kind not in KINDS:
      raise ConfigError(
        [
          f"has rope type {shown(kind)}, which is not supported; supported "
          f"are {', '.join(KINDS)}"
        ]
      )
    faults = _faults(kind, rest)
    if faults:
      raise ConfigError(faults)
    theta = rest.pop("rope_theta", 10000.0)
    rest.pop("partial_rotary_factor", None)
    original = rest.get("original_max_position_embeddings", max_positions)
    if original * rest.get("factor", 1.0) > LARGEST:
      raise ConfigError(
        [f"scales {original} positions by {rest['factor']}, which is too much"]
      )
    scaling = () if kind == "default" else tuple(sorted(rest.items()))
    return cls(kind, float(theta), head_dim, original, scaling)

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


def _faults(kind: str, fields: Mapping[str, Any]) -> list[str]:
  """What is wrong with the fields of a kind."""
  found = []
  for name, value in fields.items():
    wanted = _wanted(name, value)
    if wanted:
      found.append(
        f"has {shown(value)} for the rope field {name!r}, which must be "
        f"{wanted}"
      )
  if fields.get("partial_rotary_factor", 1) != 1:
    found.append(
      "rotates a part of each head only (partial_rotary_factor), which is not "
      "supported"
    )
  known = {"rope_theta", "partial_rotary_factor"}
  known |= {*_REQUIRED[kind], *_OPTIONAL[kind]}
  found += [
    f"has the rope field {name!r}, which rope type {kind!r} does not use"
    for name in sorted(set(fields) - known)
  ]
  found += [
    f"lacks {name!r}, which rope type {kind!r} needs"
    for name in _REQUIRED[kind]
    if name not in fields
  ]
  low, high = fields.get("low_freq_factor"), fields.get("high_freq_factor")
  if is_number(low) and is_number(high) and low >= high:
    found.append(
      f"has low_freq_factor {low} and high_freq_factor {high}; the first must "
      "be the smaller"
    )
  return found


def _wanted(name: str, value: Any) -> str | None:
  """What a known field must be, where its value is something else."""
  if name == "truncate":
    return None if isinstance(value, bool) else "true or false"
  if name == "original_max_position_embeddings":
    right = type(value) is int and 0 < value <= LARGEST
    return None if right else "a whole number of 1 or more, and no huge one"
  if name in _NUMBERS and not (is_number(value) and 0 < value < _HUGE):
    return "a number above 0, and no huge one"
  return None


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
