"""One step for everything: attend to cache and block, append, compress."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention import attention
from kvjax.activations import Activations
from kvjax.cache import LayerCache
from kvjax.methods.base import Allowance, Method


def append_and_attend(
  cache: LayerCache | None, seen: Activations
) -> tuple[Float[Array, "B N S D"], LayerCache]:
  """Puts a block into a layer's cache and attends to all of it.

  Args:
    cache: where the block goes, with room for it; None starts a new cache of
      exactly the block.
    seen: the block.

  Returns:
    The attention output, and the cache with the block in it.
  """
  cache = LayerCache.of(seen) if cache is None else cache.append(seen)
  output = attention(
    seen.queries, cache.keys, cache.values, seen.positions, cache.positions
  )
  return output, cache


def compress(
  method: Method,
  layer: int,
  cache: LayerCache,
  seen: Activations,
  allowances: Sequence[Allowance],
) -> tuple[LayerCache, ...]:
  """Keeps what a method finds best, once for every allowance.

  Args:
    method: what to keep.
    layer: index of the layer.
    cache: the candidates; the block's tokens are among them.
    seen: the block whose attention has just been computed.
    allowances: how much to keep.

  Returns:
    One cache for each allowance; the candidates themselves where nothing
    needs to go.
  """
  if method.keeps_all(layer) or all(a.whole for a in allowances):
    return tuple(cache for _ in allowances)
  # Scores are float32 on every backend.
  with jax.default_matmul_precision("highest"):
    found = method.evaluate(layer, cache, seen)
  return tuple(
    cache
    if allowance.whole
    else cache.take(method.select(found, cache, allowance))
    for allowance in allowances
  )


def block_positions(
  start: Int[Array, " B"], length: int, lengths: Int[Array, " B"]
) -> Int[Array, "B S"]:
  """Positions of a right-padded block, -1 where it is padding."""
  index = jnp.arange(length, dtype=jnp.int32)
  real = index[None] < lengths[:, None]
  return jnp.where(real, start[:, None] + index[None], -1)
