"""Column sums of attention weights on Hopper GPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.kernels.attention.options import (
  PLAIN,
  AttentionOptions,
  decline_unless_plain,
)
from kvjax.kernels.attention_mass.gpu_sweeps import LSE, MASS, ROWS, sweep
from kvjax.kernels.attention_mass.tiles import NEVER, filled


def causal_mass_gpu(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B K T"],
  sinks: Float[Array, " N"] | None = None,
  options: AttentionOptions = PLAIN,
) -> Float[Array, "B N T"]:
  """See `kvjax.kernels.attention_mass.api.causal_mass`, and `_mass`.

  Raises:
    NotImplementedError: attention is not plain.
  """
  decline_unless_plain(options, keys.shape[-1], sinks=sinks)
  batch, kv_heads, _, dim = keys.shape
  asked = jnp.broadcast_to(
    query_positions[:, None], (batch, kv_heads, queries.shape[2])
  )
  return _mass(queries, keys, asked, key_positions, dim**-0.5, 0)


def chunk_mass_gpu(
  queries: Float[Array, "B N T D"],
  keys: Float[Array, "B K T D"],
  valid: Bool[Array, "B K T"],
  chunk: int,
  scale: float,
) -> Float[Array, "B N T"]:
  """See `kvjax.kernels.attention_mass.api.chunk_mass`, and `_mass`.

  Raises:
    NotImplementedError: the chunks are not a multiple of 128 slots.
  """
  if valid.shape[2] <= chunk:
    chunk = 0
  if chunk % ROWS:
    raise NotImplementedError(f"There is no kernel for chunks of {chunk}.")
  # All that a chunk holds sees and is seen.
  places = jnp.where(valid, 0, -1)
  return _mass(queries, keys, places, places, scale, chunk)


def _mass(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  query_places: Int[Array, "B K S"],
  key_places: Int[Array, "B K T"],
  scale: float,
  chunk: int,
) -> Float[Array, "B N T"]:
  """Column sums of the weights of keys of places from 0 to the query's.

  Every query's log-sum-exp is found first, then every key's mass.

  Args:
    queries: of a 16-bit dtype, whose products float32 holds exactly.
    keys: likewise.
    query_places: -1 for none.
    key_places: -1 for none.
    scale: of the logits.
    chunk: slots that see each other, a multiple of `ROWS`; 0 is all.

  Raises:
    NotImplementedError: of other dtypes, of dimensions that are not 64, 128,
      192 or 256, or of nothing.
  """
  dtype, dim = queries.dtype, queries.shape[-1]
  if dtype != keys.dtype or dtype not in (jnp.bfloat16, jnp.float16):
    raise NotImplementedError(f"There is no kernel for {dtype}, {keys.dtype}.")
  if dim % 64 or dim > 256 or not (queries.size and keys.size):
    raise NotImplementedError(f"There is no kernel for {queries.shape}.")
  slots = keys.shape[2]
  asked = filled(query_places, 2, ROWS, -1)
  places = jnp.where(key_places >= 0, key_places, NEVER)
  places = filled(places, 2, ROWS, NEVER)
  queries, keys = (filled(x, 2, ROWS, 0) for x in (queries, keys))
  found = sweep(LSE, queries, keys, asked, places, scale, chunk)
  # A query that sees nothing gives nothing: exp(UNSEEN - 0) is 0.
  lse = jax.nn.logsumexp(found, axis=2)
  lse = jnp.where(lse > -jnp.inf, lse, 0.0)
  found = sweep(MASS, keys, queries, places, asked, scale, chunk, lse)
  return jnp.sum(found, axis=2)[..., :slots]
