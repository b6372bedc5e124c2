"""Attention mass inside chunks, on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from kvjax.kernels.attention_mass.tiles import MASKED, pad_to_multiple
from kvjax.kernels.attention_mass.tpu_tiles import (
  check,
  column,
  joined_heads,
  kv_head,
  logits,
  params,
)

# Logits per step: one chunk, for as many heads of a group as fit into VMEM.
# Their number is fixed: with fewer, the kernel would decline long chunks.
_LOGITS = 2**20


def chunk_mass_tpu(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
) -> Float[Array, "B N T"]:
  """Computes `kvjax.kernels.attention_mass.api.chunk_mass`, a chunk per step.

  Raises:
    NotImplementedError: a dtype is neither bfloat16 nor float32, chunks are not
      a multiple of 128 slots or longer than 1024, or an array is empty.
  """
  check(queries, keys)
  batch, heads, slots, dim = queries.shape
  size = min(chunk, pl.cdiv(slots, 128) * 128)
  if size % 128 or size**2 > _LOGITS:
    raise NotImplementedError(f"There is no kernel for chunks of {chunk}.")
  group = heads // keys.shape[1]
  joined = joined_heads(group, _LOGITS // size**2)
  parts = heads // joined
  kv_head_of = functools.partial(kv_head, joined=joined, group=group)
  # Queries and keys need no copy: beyond T they are undefined, but masked.
  padded_valid = pad_to_multiple(valid.astype(jnp.int32), 2, size, 0)[
    :, :, None
  ]
  mass = pl.pallas_call(
    functools.partial(_chunk, scale=scale),
    grid=(batch, parts, padded_valid.shape[-1] // size),
    in_specs=[
      pl.BlockSpec(
        (None, None, 1, size), lambda b, p, c: (b, kv_head_of(p), 0, c)
      ),
      pl.BlockSpec(
        (None, None, joined, size, dim), lambda b, p, c: (b, p, 0, c, 0)
      ),
      pl.BlockSpec(
        (None, None, size, dim), lambda b, p, c: (b, kv_head_of(p), c, 0)
      ),
    ],
    out_specs=pl.BlockSpec(
      (None, None, joined, size), lambda b, p, c: (b, p, 0, c)
    ),
    out_shape=jax.ShapeDtypeStruct((batch, parts, joined, slots), jnp.float32),
    compiler_params=params(3, 0),
    name="chunk_mass",
  )(padded_valid, queries.reshape(batch, parts, joined, slots, dim), keys)
  return mass.reshape(batch, heads, slots)


def _chunk(
  valid: Any, queries: Any, keys: Any, mass: Any, *, scale: float
) -> None:
  """Computes the masses of a chunk for some heads.

  Shapes: valid [1, C], queries [H, C, D], keys [C, D], mass [H, C].
  """
  joined, size, dim = queries.shape
  tile = logits(queries[...].reshape(-1, dim), keys[...], scale)
  tile = jnp.where(valid[...] > 0, tile, MASKED)
  # A valid query sees at least itself, so the maximum is a real logit.
  weights = jnp.exp(tile - jnp.max(tile, axis=1, keepdims=True))
  weights = weights / jnp.sum(weights, axis=1, keepdims=True)
  # An invalid query may be NaN.
  is_query = jnp.concatenate([column(valid[...])] * joined)
  weights = jnp.where(is_query > 0, weights, 0.0)
  mass[...] = jnp.sum(weights.reshape(joined, size, size), axis=1)
