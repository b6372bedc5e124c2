"""Rotary position embeddings: default, linear, dynamic, llama3 and yarn."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import InputError
from kvjax.models.fields import LARGEST, ConfigError, format_value, is_number

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

# Fields that each kind requires, and those that it may have.
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
  "dynamic": ("original_max_position_embeddings",),
  "llama3": (),
  "yarn": (
    "attention_factor",
    "attn_factor",
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
# Frequencies are float32, and so are their products with positions.
_TINY, _HUGE = 1e-6, 1e30
# Fields about the origin of the file.
_WITHOUT_EFFECT = ("finetuned",)


@dataclasses.dataclass(frozen=True)
class Rope:
  """The rotary embedding of a model.

  Attributes:
    kind: one of `KINDS`.
    theta: base of the frequencies.
    head_dim: D, even.
    original_context: context in tokens before any scaling.
    scaling: the other fields, as sorted pairs.
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
      ConfigError: the kind is unknown, or fields are missing or invalid.
    """
    rest = {k: v for k, v in fields.items() if v is not None}
    kind = rest.pop("rope_type", None) or rest.get("type", "default")
    for name in ("type", *_WITHOUT_EFFECT):
      rest.pop(name, None)
    if not isinstance(kind, str) or kind not in KINDS:
      raise ConfigError(
        [
          f"has rope type {format_value(kind)}, which is not supported; "
          f"supported are {', '.join(KINDS)}"
        ]
      )
    faults = _find_faults(kind, rest, max_positions)
    if faults:
      raise ConfigError(faults)
    theta = rest.pop("rope_theta", 10000.0)
    if kind == "yarn" and theta <= 1:
      raise ConfigError(
        [f"has rope_theta {theta}, which rope type 'yarn' needs above 1"]
      )
    if kind == "dynamic" and head_dim < 4:
      raise ConfigError(
        [
          f"has heads of {head_dim} dimensions; rope type 'dynamic' needs 4 or "
          "more"
        ]
      )
    rest.pop("partial_rotary_factor", None)
    if kind == "dynamic":
      # It equals `max_positions`.
      rest.pop("original_max_position_embeddings", None)
    # A factor of 1; see `_find_faults`.
    rest.pop("attn_factor", None)
    original = rest.get("original_max_position_embeddings", max_positions)
    # Positions are int32.
    if original * rest.get("factor", 1.0) > LARGEST:
      raise ConfigError(
        [f"scales {original} positions by {rest['factor']}, which is too much"]
      )
    scaling = () if kind == "default" else tuple(sorted(rest.items()))
    return cls(kind, float(theta), head_dim, original, scaling)

  def to_hf(self) -> dict[str, Any]:
    """Returns the fields that `from_hf` reads."""
    if self.kind == "default":
      return {"rope_theta": self.theta}
    scaling = {"rope_type": self.kind, **dict(self.scaling)}
    return {"rope_theta": self.theta, "rope_scaling": scaling}

  def max_context(self, max_positions: int) -> int:
    """Maximum context length with scaling."""
    if self.kind in ("default", "llama3"):
      return max_positions
    factor = dict(self.scaling)["factor"]
    return max(max_positions, int(self.original_context * factor))

  def tables(
    self, positions: Int[Array, "B S"]
  ) -> tuple[Float[Array, "B S R"], Float[Array, "B S R"]]:
    """Computes float32 cosines and sines of every position's angles.

    Those of padding (position -1) are finite and arbitrary. The dynamic kind
    scales each row by its length.
    """
    clipped = jnp.maximum(positions, 0)
    frequencies, scale = _FREQUENCIES[self.kind](self, clipped)
    angles = clipped.astype(jnp.float32)[:, :, None] * frequencies[:, None, :]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale

  def rerotate(
    self, keys: Float[Array, "B K T D"], by: Int[Array, "B K T"]
  ) -> Float[Array, "B K T D"]:
    """Moves keys that were rotated at positions p to p + `by`.

    Raises:
      InputError: the dynamic kind, whose angles depend on the row's length.
    """
    if self.kind == "dynamic":
      raise InputError(
        "Keys of a dynamic rotary embedding cannot be moved to other places: "
        "their angles depend on the length of the row."
      )
    # Tokens move by different amounts in each head, and a table is that of a
    # row, so heads become rows.
    shift = by.reshape(-1, by.shape[2])
    # Without the scale of yarn, which the keys have from their first rotation.
    frequencies, _ = _FREQUENCIES[self.kind](self, shift)
    angles = shift.astype(jnp.float32)[:, :, None] * frequencies[:, None, :]
    flat = keys.reshape(-1, 1, *keys.shape[2:])
    return rotate(flat, jnp.cos(angles), jnp.sin(angles)).reshape(keys.shape)


def _find_faults(
  kind: str, fields: Mapping[str, Any], max_positions: int
) -> list[str]:
  """Lists the errors in the fields of a kind."""
  faults = []
  for name, value in fields.items():
    expected = _describe_expected(name, value)
    if expected:
      faults.append(
        f"has {format_value(value)} for the rope field {name!r}, which must be "
        f"{expected}"
      )
  if fields.get("partial_rotary_factor", 1) != 1:
    faults.append(
      "rotates a part of each head only (partial_rotary_factor), which is not "
      "supported"
    )
  if kind == "yarn" and fields.get("attn_factor", 1) != 1:
    faults.append(
      f"has {format_value(fields['attn_factor'])} for the rope field "
      "'attn_factor', which is not supported; give the whole factor as "
      "'attention_factor'"
    )
  original = fields.get("original_max_position_embeddings", max_positions)
  if kind == "dynamic" and original != max_positions:
    faults.append(
      f"has {format_value(original)} for the rope field "
      "'original_max_position_embeddings', which rope type 'dynamic' does not "
      f"use; only {max_positions}, max_position_embeddings, is supported"
    )
  known = {"rope_theta", "partial_rotary_factor"}
  known |= {*_REQUIRED[kind], *_OPTIONAL[kind]}
  faults += [
    f"has the rope field {name!r}, which rope type {kind!r} does not use"
    for name in sorted(set(fields) - known)
  ]
  faults += [
    f"lacks {name!r}, which rope type {kind!r} needs"
    for name in _REQUIRED[kind]
    if name not in fields
  ]
  low, high = fields.get("low_freq_factor"), fields.get("high_freq_factor")
  if is_number(low) and is_number(high) and low >= high:
    faults.append(
      f"has low_freq_factor {low} and high_freq_factor {high}; the first must "
      "be the smaller"
    )
  return faults


def _describe_expected(name: str, value: Any) -> str | None:
  """Describes what a field must be if its value is invalid, else None."""
  if name == "truncate":
    return None if isinstance(value, bool) else "true or false"
  if name == "original_max_position_embeddings":
    valid = type(value) is int and 0 < value <= LARGEST
    return None if valid else "a whole number of 1 or more, and no huge one"
  if name in _NUMBERS and not (is_number(value) and 0 < value < _HUGE):
    return "a number above 0, and no huge one"
  if name in _NUMBERS and value < _TINY:
    return "a number above 0, and no tiny one"
  return None


def rotate(
  x: Float[Array, "B H S D"],
  cos: Float[Array, "B S R"],
  sin: Float[Array, "B S R"],
) -> Float[Array, "B H S D"]:
  """Rotates the pairs (i, i + D/2) of every head; computed in float32."""
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, None], sin[:, None]
  rotated = jnp.concatenate(
    [low * cos - high * sin, high * cos + low * sin], axis=-1
  )
  return rotated.astype(x.dtype)


def _inverse_frequencies(theta: float, head_dim: int) -> np.ndarray:
  # In float32, as in transformers: far positions multiply the rounding.
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
  """NTK-aware base that grows with the row beyond the original context.

  The length is that up to the end of the current block. Keys in the cache keep
  the base that they were rotated with, as in transformers. Therefore results in
  blocks differ from those of whole prompts.
  """
  factor = dict(rope.scaling)["factor"]
  original = rope.original_context
  length = jnp.max(place, axis=1).astype(jnp.float32) + 1.0
  # 1 up to the original context.
  stretch = jnp.maximum(length, original) * (factor / original) - (factor - 1)
  power = rope.head_dim / (rope.head_dim - 2)
  theta = rope.theta * stretch**power
  exponents = jnp.arange(0, rope.head_dim, 2, dtype=jnp.float32)
  exponents = exponents / rope.head_dim
  return 1.0 / theta[:, None] ** exponents[None, :], 1.0


def _llama3(rope: Rope, _: Array) -> tuple[Array, float]:
  """Llama 3.1: low frequencies scaled, high ones kept, a ramp in between."""
  fields = dict(rope.scaling)
  factor = fields["factor"]
  low, high = fields["low_freq_factor"], fields["high_freq_factor"]
  base = _inverse_frequencies(rope.theta, rope.head_dim)
  wavelength = 2 * np.pi / base
  ramp = (rope.original_context / wavelength - low) / (high - low)
  # Clipped, the ramp covers all three of transformers' cases.
  ramp = np.clip(ramp, 0.0, 1.0)
  scaled = (1 - ramp) * base / factor + ramp * base
  return jnp.asarray(scaled.astype(np.float32))[None, :], 1.0


def _yarn(rope: Rope, _: Array) -> tuple[Array, float]:
  """YaRN (arXiv 2309.00071): interpolation by parts and a scaled softmax."""
  fields = dict(rope.scaling)
  factor = fields["factor"]
  half = rope.head_dim // 2

  def dimension(rotations: float) -> float:
    # The pair of channels, as a real number, that makes so many rotations over
    # the original context.
    turns = rope.original_context / (rotations * 2 * math.pi)
    return rope.head_dim * math.log(turns) / (2 * math.log(rope.theta))

  low = dimension(fields.get("beta_fast", 32))
  high = dimension(fields.get("beta_slow", 1))
  if fields.get("truncate", True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, rope.head_dim - 1)
  if low == high:
    # A step in place of a ramp, without dividing by zero; as in transformers.
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
