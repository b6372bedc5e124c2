"""Tiles of logits on TPUs."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

_VMEM_BYTES = 32 * 2**20


def check(*arrays: Array) -> None:
  """Raises NotImplementedError of nothing, or not bfloat16 or float32."""
  for x in arrays:
    if not x.size or x.dtype not in (jnp.bfloat16, jnp.float32):
      raise NotImplementedError(f"There is no kernel for {x.dtype}{x.shape}.")


def logits(
  queries: Float[Array, "R D"], keys: Float[Array, "C D"], scale: float
) -> Float[Array, "R C"]:
  """Scaled inner products, exact to float32's rounding."""
  # The tensor core multiplies bfloat16 exactly, and only that in one go.
  narrow = queries.dtype == keys.dtype == jnp.bfloat16
  if not narrow:
    queries, keys = queries.astype(jnp.float32), keys.astype(jnp.float32)
  precision = jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST
  return scale * jax.lax.dot_general(
    queries,
    keys,
    (((1,), (1,)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def column(row: Int[Array, "1 R"]) -> Int[Array, "R 1"]:
  """What lies along lanes, along sublanes."""
  return row.reshape(-1, 1)


def joined_heads(group: int, most: int) -> int:
  """How many of a group's heads make a tile: as many as fit, and divide it."""
  return max(d for d in range(1, max(1, most) + 1) if group % d == 0)


def kv_head(part: Array, joined: int, group: int) -> Array:
  """The KV head that a part reads: so many joined heads of a group."""
  return jax.lax.div(part, group // joined)


def params(parallel: int, arbitrary: int) -> pltpu.CompilerParams:
  """Of a grid whose first axes are independent of each other."""
  return pltpu.CompilerParams(
    dimension_semantics=(
      *(pltpu.PARALLEL,) * parallel,
      *(pltpu.ARBITRARY,) * arbitrary,
    ),
    vmem_limit_bytes=_VMEM_BYTES,
  )
