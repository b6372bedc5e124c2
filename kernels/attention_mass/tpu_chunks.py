"""Column sums of attention weights inside chunks, on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from kvjax.kernels.attention_mass.tiles import UNSEEN, filled
from kvjax.kernels.attention_mass.tpu_tiles import (
  check,
  column,
  joined_heads,
  kv_head,
  logits,
  params,
)

# Logits of a step: of a chunk, for as many heads of a group as fit.
_LOGITS = 2**20


def chunk_mass_tpu(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
) -> Float[Array, "B N T"]:
  """See `kvjax.kernels.attention_mass.api.chunk_mass`; a chunk is one step.

  Raises:
    NotImplementedError: of dtypes other than bfloat16 and float32, of chunks
      that are not a multiple of 128 slots or of more than 1024, or of nothing.
  """
  check(queries, keys)
  batch, heads, slots, dim = queries.shape
  size = min(chunk, pl.cdiv(slots, 128) * 128)
  if size % 128 or size**2 > _LOGITS:
    raise NotImplementedError(f"There is no kernel for chunks of {chunk}.")
  group = heads // keys.shape[1]
  joined = joined_heads(group, _LOGITS // size**2)
  parts = heads // joined
  reads = functools.partial(kv_head, joined=joined, group=group)
  here = filled(valid.astype(jnp.int32), 2, size, 0)[:, :, None]
  mass = pl.pallas_call(
    functools.partial(_chunk, scale=scale),
    grid=(batch, parts, here.shape[-1] // size),
    in_specs=[
      pl.BlockSpec((None, None, 1, size), lambda b, p, c: (b, reads(p), 0, c)),
      pl.BlockSpec(
        (None, None, joined, size, dim), lambda b, p, c: (b, p, 0, c, 0)
      ),
      pl.BlockSpec(
        (None, None, size, dim), lambda b, p, c: (b, reads(p), c, 0)
      ),
    ],
    out_specs=pl.BlockSpec(
      (None, None, joined, size), lambda b, p, c: (b, p, 0, c)
    ),
    out_shape=jax.ShapeDtypeStruct((batch, parts, joined, slots), jnp.float32),
    compiler_params=params(3, 0),
    name="chunk_mass",
  )(here, queries.reshape(batch, parts, joined, slots, dim), keys)
  return mass.reshape(batch, heads, slots)


def _chunk(
  valid: Any, queries: Any, keys: Any, mass: Any, *, scale: float
) -> None:
  """One chunk for some heads: 1 C, H C D and C D to H C."""
  joined, size, dim = queries.shape
  found = logits(queries[...].reshape(-1, dim), keys[...], scale)
  found = jnp.where(valid[...] > 0, found, UNSEEN)
  weights = jnp.exp(found - jnp.max(found, axis=1, keepdims=True))
  weights = weights / jnp.sum(weights, axis=1, keepdims=True)
  # A query that is not held may be NaN.
  asks = jnp.concatenate([column(valid[...])] * joined)
  weights = jnp.where(asks > 0, weights, 0.0)
  mass[...] = jnp.sum(weights.reshape(joined, size, size), axis=1)
