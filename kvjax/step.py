"""One step for everything: attend to cache and block, append, compress."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention import attention
from kvjax.activations import Activations
from kvjax.cache import LayerCache
from kvjax.methods.base import Method
from kvjax.selection import top_slots


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
  choices: tuple[tuple[int, Int[Array, " B"]], ...],
) -> tuple[LayerCache, ...]:
  """Keeps what a method finds best, once for every choice of budget.

  Args:
    method: the scores, computed once.
    layer: index of the layer.
    cache: the candidates; the block's tokens are among them.
    seen: the block whose attention has just been computed.
    choices: for each budget, the capacity of the new cache (static) and the
      tokens that each row keeps.

  Returns:
    One cache for each choice; the candidates themselves where nothing needs
    to go.
  """
  if method.keeps_all(layer) or all(
    capacity >= cache.capacity for capacity, _ in choices
  ):
    return tuple(cache for _ in choices)
  scores = method.scores(layer, cache, seen)
  held = cache.positions >= 0
  kept = []
  for capacity, counts in choices:
    if capacity >= cache.capacity:
      kept.append(cache)
      continue
    protected = method.protected(cache, counts)
    kept.append(
      cache.take(top_slots(scores, held, protected, counts, capacity))
    )
  return tuple(kept)


def block_positions(
  start: Int[Array, " B"], length: int, lengths: Int[Array, " B"]
) -> Int[Array, "B S"]:
  """Positions of a right-padded block, -1 where it is padding."""
  index = jnp.arange(length, dtype=jnp.int32)
  real = index[None] < lengths[:, None]
  return jnp.where(real, start[:, None] + index[None], -1)
