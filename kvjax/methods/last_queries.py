"""The last queries of a prompt, and their attention."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.activations import Activations
from kvjax.cache.layers import LayerCache
from kvjax.cache.row_ends import row_ends
from kvjax.errors import InputError
from kvjax.heads import by_kv_head
from kvjax.kernels.attention_mass import causal_mass
from kvjax.methods.softmax import softmax
from kvjax.options.bounds import check_count


def window_queries(
  cache: LayerCache, activations: Activations, window: int
) -> tuple[Float[Array, "B N W D"], Int[Array, "B W"]]:
  """Returns the last real queries of every row, and their positions.

  Args:
    cache: the cache; if it has an observation window, its end is returned.
    activations: activations of the block.
    window: number of queries; at most those of the block. If a row has fewer,
      the remaining ones are arbitrary, with position -1.

  Raises:
    InputError: `window` is no whole number of 1 or more, or the queries have
      gone, as the method's traits do not declare that it reads so many.
  """
  check_count("The window of last queries", window)
  stored = cache.window
  if stored is not None and stored.positions.shape[1] >= window:
    first = stored.positions.shape[1] - window
    return stored.queries[:, :, first:], stored.positions[:, first:]
  length, held = activations.positions.shape[1], activations.queries.shape[2]
  if stored is not None or not length:
    raise InputError(
      f"A method that reads the last {window} queries must declare them as "
      f"Traits(window={window}) to evict in blocks or while decoding."
    )
  size = min(window, length)
  if held < size:
    raise InputError(
      f"A method that reads the last {window} queries must declare them as "
      f"Traits(queries={window}); {held} of this prompt's are left."
    )
  return row_ends(activations.queries, activations.query_positions, size)


def window_mass(
  cache: LayerCache, activations: Activations, window: int
) -> Float[Array, "B K G T"]:
  """Computes the attention of the last queries to every slot, summed over them.

  It is in float32; see `window_queries` for the arguments.
  """
  queries, positions = window_queries(cache, activations, window)
  mass = causal_mass(
    queries,
    cache.keys,
    positions,
    cache.positions,
    options=activations.attention,
    sinks=activations.sinks,
  )
  return by_kv_head(mass, cache.keys.shape[1])


def window_weights(
  cache: LayerCache, activations: Activations, window: int
) -> Float[Array, "B K G W T"]:
  """Computes the attention weights of the last queries, in float32.

  Queries that a row does not have get zeros. The memory of all weights is that
  of W queries per head; see `window_mass` for their sum.

  Args:
    cache: the cache.
    activations: activations of the block.
    window: W, number of queries.
  """
  queries, positions = window_queries(cache, activations, window)
  kv_heads, options = cache.keys.shape[1], activations.attention
  queries = by_kv_head(queries.astype(jnp.float32), kv_heads)
  at = positions[:, None, None, :, None]
  slots = cache.positions[:, :, None, None]
  visible = (at >= 0) & (slots >= 0) & options.visible(at, slots)
  keys = cache.float_keys
  logits = jnp.einsum("bkgwd,bktd->bkgwt", queries, keys)
  logits = options.cap(logits * options.scale_of(keys.shape[-1]))
  sinks = activations.sinks
  if sinks is not None:
    sinks = by_kv_head(sinks.astype(jnp.float32)[None], kv_heads)
    sinks = sinks[..., None, None]
  return softmax(logits, visible, sinks)
