"""The frequencies of each kind of rotary embedding, and its scale."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@runtime_checkable
class Scaled(Protocol):
  """What frequencies are computed from; see `kvjax.models.rope.Rope`."""

  @property
  def theta(self) -> float:
    """Base of the frequencies."""

  @property
  def dim(self) -> int:
    """Number of rotated channels of a head."""

  @property
  def original_context(self) -> int:
    """Context in tokens before any scaling."""

  @property
  def scaling(self) -> tuple[tuple[str, Any], ...]:
    """The fields of the kind."""


# Maps positions, which may decide on the scaling of their row, to frequencies,
# one per pair of channels, and to the factor of cosines and sines.
Frequencies = Callable[
  [Scaled, Int[Array, "B S"]], tuple[Float[Array, "_ R"], float]
]


def _inverse_frequencies(theta: float, head_dim: int) -> np.ndarray:
  # In float32, as in transformers: far positions multiply the rounding.
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
  return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def _default(rope: Scaled, _: Array) -> tuple[Array, float]:
  base = _inverse_frequencies(rope.theta, rope.dim)
  return jnp.asarray(base)[None, :], 1.0


def _linear(rope: Scaled, _: Array) -> tuple[Array, float]:
  factor = np.float32(dict(rope.scaling)["factor"])
  base = _inverse_frequencies(rope.theta, rope.dim)
  return jnp.asarray(base / factor)[None, :], 1.0


def _dynamic(rope: Scaled, place: Array) -> tuple[Array, float]:
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
  power = rope.dim / (rope.dim - 2)
  theta = rope.theta * stretch**power
  exponents = jnp.arange(0, rope.dim, 2, dtype=jnp.float32)
  exponents = exponents / rope.dim
  return 1.0 / theta[:, None] ** exponents[None, :], 1.0


def _llama3(rope: Scaled, _: Array) -> tuple[Array, float]:
  """Llama 3.1: low frequencies scaled, high ones kept, a ramp in between."""
  fields = dict(rope.scaling)
  factor = fields["factor"]
  low, high = fields["low_freq_factor"], fields["high_freq_factor"]
  base = _inverse_frequencies(rope.theta, rope.dim)
  wavelength = 2 * np.pi / base
  ramp = (rope.original_context / wavelength - low) / (high - low)
  # Clipped, the ramp covers all three of transformers' cases.
  ramp = np.clip(ramp, 0.0, 1.0)
  scaled = (1 - ramp) * base / factor + ramp * base
  return jnp.asarray(scaled.astype(np.float32))[None, :], 1.0


def _yarn(rope: Scaled, _: Array) -> tuple[Array, float]:
  """YaRN (arXiv 2309.00071): interpolation by parts and a scaled softmax."""
  fields = dict(rope.scaling)
  factor = fields["factor"]
  half = rope.dim // 2

  def dimension(rotations: float) -> float:
    # The pair of channels, as a real number, that makes so many rotations over
    # the original context.
    turns = rope.original_context / (rotations * 2 * math.pi)
    return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

  low = dimension(fields.get("beta_fast", 32))
  high = dimension(fields.get("beta_slow", 1))
  if fields.get("truncate", True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, rope.dim - 1)
  if low == high:
    # A step in place of a ramp, without dividing by zero; as in transformers.
    high += 0.001
  ramp = np.clip((np.arange(half) - low) / (high - low), 0.0, 1.0)
  base = _inverse_frequencies(rope.theta, rope.dim)
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


def _longrope(rope: Scaled, place: Array) -> tuple[Array, float]:
  """LongRoPE (arXiv 2402.13753): a divisor for each frequency.

  There are two lists: `short_factor` for rows within the original context, and
  `long_factor` for longer ones. The length is that up to the end of the current
  block, as for the dynamic kind, and keys in the cache keep their frequencies.
  """
  fields = dict(rope.scaling)
  base = _inverse_frequencies(rope.theta, rope.dim)
  short, long = (
    jnp.asarray(base / np.asarray(fields[name], np.float32))[None, :]
    for name in ("short_factor", "long_factor")
  )
  is_long = jnp.max(place, axis=1) >= rope.original_context
  scale = fields.get("attention_factor")
  if scale is None:
    ratio = math.log(fields["factor"]) / math.log(rope.original_context)
    scale = math.sqrt(1 + max(ratio, 0.0))
  return jnp.where(is_long[:, None], long, short), float(scale)


FREQUENCIES: dict[str, Frequencies] = {
  "default": _default,
  "linear": _linear,
  "dynamic": _dynamic,
  "llama3": _llama3,
  "yarn": _yarn,
  "longrope": _longrope,
}
