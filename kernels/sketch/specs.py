"""Sketches of the keys of Llama-3.1-8B, as Compactor uses them."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.kernels.sketch.api import leverage_rows, sketch
from kvjax.kernels.sketch.sketched import Sketch
from kvjax.kernels.specs import Choices, Spec

_HEADS, _DIM = 8, 128


def _sketching(
  batch: int, length: int, width: int, chunk: int, center: bool
) -> Spec:
  def arrays(key: Array) -> tuple[Array, ...]:
    keys = jax.random.normal(key, (batch, _HEADS, length, _DIM), jnp.bfloat16)
    factor = jax.random.normal(key, (_HEADS, _DIM, width)) * width**-0.5
    return keys, jnp.ones((batch, _HEADS, length), bool), factor

  run = functools.partial(sketch, chunk=chunk, center=center)
  grams = math.ceil(length / chunk) if chunk else 1
  per_head = length * (2 * _DIM + 1 + 4 * width) + 4 * grams * width**2
  return Spec(
    f"{batch} x {length:,} keys, {width} columns, "
    f"{f'chunks of {chunk}' if chunk else 'whole'}"
    f"{', centered' if center else ''}",
    run,
    arrays,
    batch * _HEADS * per_head + 4 * _HEADS * _DIM * width,
    compared=_centered,
  )


def _centered(sketched: Sketch) -> tuple[Array, Array]:
  """The columns, from which only XLA's program has subtracted the mean."""
  return sketched.projected - sketched.mean[..., None], sketched.gram


def _leverage(batch: int, length: int, width: int) -> Spec:
  def arrays(key: Array) -> tuple[Array, ...]:
    shape = (batch, _HEADS, 1, width)
    columns = jax.random.normal(key, (*shape, length))
    whitener = jnp.broadcast_to(jnp.eye(width), (*shape, width))
    valid = jnp.ones((batch, _HEADS, length), bool)
    return columns, jnp.zeros(shape), whitener, valid

  def run(columns: Array, mean: Array, whitener: Array, valid: Array) -> Array:
    # Leverage scores do not read the Gram matrix, so any array will do.
    sketched = Sketch(columns, mean, whitener)
    return leverage_rows(sketched, whitener, valid, chunk=0)

  per_head = length * (4 * width + 1 + 4) + 4 * width**2
  return Spec(
    f"{batch} x {length:,} leverage rows, {width} columns",
    run,
    arrays,
    batch * _HEADS * per_head,
  )


SPECS: tuple[Spec, ...] = (
  _sketching(1, 131072, 64, 0, center=False),
  _sketching(4, 32768, 64, 0, center=False),
  _sketching(4, 32768, 48, 512, center=True),
  _leverage(1, 131072, 64),
)

CHOICES = (
  Choices("sketch/gpu", {"blocks": (128, 256, 512)}, SPECS[0]),
  # Longer steps do not fit into VMEM.
  Choices("sketch/tpu", {"step": (2**17, 2**18, 3 * 2**17)}, SPECS[0]),
)
