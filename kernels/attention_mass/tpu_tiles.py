"""Tiles of logits on TPUs."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

_VMEM_BYTES = 32 * 2**20


def check(*arrays: Array) -> None:
  """Declines empty arrays and dtypes other than bfloat16 and float32."""
  for x in arrays:
    if not x.size or x.dtype not in (jnp.bfloat16, jnp.float32):
      raise NotImplementedError(f"There is no kernel for {x.dtype}{x.shape}.")


def logits(
  queries: Float[Array, "R D"], keys: Float[Array, "C D"], scale: float
) -> Float[Array, "R C"]:
  """Computes scaled inner products, exact to float32 rounding."""
  # One pass of the matrix unit multiplies bfloat16 exactly; float32 needs more.
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
  """Transposes a vector from lanes to sublanes."""
  return row.reshape(-1, 1)


def joined_heads(group: int, most: int) -> int:
  """Returns the largest divisor of the group that is at most `most`."""
  # A divisor, so that the heads of a part all read the same KV head.
  return max(d for d in range(1, max(1, most) + 1) if group % d == 0)


def kv_head(part: Array, joined: int, group: int) -> Array:
  """Returns the KV head that a part of `joined` heads reads."""
  return jax.lax.div(part, group // joined)


def params(parallel: int, arbitrary: int) -> pltpu.CompilerParams:
  """Returns parameters of a grid whose first axes are independent."""
  return pltpu.CompilerParams(
    dimension_semantics=(
      *(pltpu.PARALLEL,) * parallel,
      *(pltpu.ARBITRARY,) * arbitrary,
    ),
    vmem_limit_bytes=_VMEM_BYTES,
  )
