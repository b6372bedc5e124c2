"""The gradient of attention, from its result, for a part of its keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.kernels.attention.options import AttentionOptions
from kvjax.kernels.attention.partial import Partial

# Logits per query head in memory at once.
_LOGITS = 2**17


class Cotangents(NamedTuple):
  """Gradients of a sum with respect to what attention reads, in float32.

  Attributes:
    queries: those of the queries, by this part of the keys.
    keys: those of the keys.
    values: those of the values.
  """

  queries: Float[Array, "B N S D"]
  keys: Float[Array, "B K T D"]
  values: Float[Array, "B K T Dv"]


def attention_gradient(
  queries: Float[Array, "B N S D"],
  keys: Float[Array, "B K T D"],
  values: Float[Array, "B K T Dv"],
  query_positions: Int[Array, "B S"],
  key_positions: Int[Array, "B T"],
  whole: Partial,
  cotangent: Float[Array, "B N S Dv"],
  options: AttentionOptions,
) -> Cotangents:
  """Computes the gradients through some of the keys, in O(S + T) memory.

  Gradients of the queries by disjoint parts of the keys add up. With the weight
  p of a key, value v, output o and cotangent g, that of a logit is
  p (g v - g o).

  Args:
    queries: rotated queries; contents of padding, NaN included, have no effect.
    keys: a part of the rotated keys, likewise.
    values: their values, likewise.
    query_positions: position of each query in its row, -1 for padding.
    key_positions: position of each key in its row, -1 for empty slots.
    whole: attention to all keys.
    cotangent: gradient with respect to the output; zero for padding.
    options: window, scale and softcap.
  """
  batch, kv_heads, slots, dim = keys.shape
  length = queries.shape[2]
  scale = options.scale_of(dim)
  size = min(slots, max(1, _LOGITS // length))
  count = -(-slots // size)
  real = query_positions >= 0

  def grouped(x: Float[Array, "B N S *D"]) -> Float[Array, "B K G S *D"]:
    x = x.astype(jnp.float32)
    return x.reshape(batch, kv_heads, -1, length, *x.shape[3:])

  def cut(x: Float[Array, "B K T D"]) -> Float[Array, "c B K C D"]:
    empty = (key_positions < 0)[:, None, :, None]
    x = jnp.where(empty, 0.0, x.astype(jnp.float32))
    x = jnp.pad(x, ((0, 0), (0, 0), (0, count * size - slots), (0, 0)))
    x = x.reshape(batch, kv_heads, count, size, x.shape[-1])
    return jnp.moveaxis(x, 2, 0)

  def join(x: Float[Array, "c B K C D"]) -> Float[Array, "B K T D"]:
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(batch, kv_heads, -1, x.shape[-1])[:, :, :slots]

  asked = grouped(jnp.where(real[:, None, :, None], queries, 0))
  given, lse = grouped(cotangent), grouped(whole.lse)[..., None]
  mean = jnp.sum(given * grouped(whole.output), axis=-1, keepdims=True)

  def visit(
    total: Float[Array, "B K G S D"],
    part: tuple[Array, Array, Int[Array, "B C"]],
  ) -> tuple[Float[Array, "B K G S D"], tuple[Array, Array]]:
    keys, values, positions = part
    places = positions[:, None, None, None]
    visible = (places >= 0) & options.visible(
      query_positions[:, None, None, :, None], places
    )
    logits = jnp.einsum("bkgsd,bkcd->bkgsc", asked, keys) * scale
    capped = options.cap(logits)
    weights = jnp.where(visible, jnp.exp(capped - lse), 0.0)
    change = weights * (jnp.einsum("bkgsd,bkcd->bkgsc", given, values) - mean)
    if options.softcap is not None:
      change = change * (1.0 - (capped / options.softcap) ** 2)
    change = change * scale
    total = total + jnp.einsum("bkgsc,bkcd->bkgsd", change, keys)
    return total, (
      jnp.einsum("bkgsc,bkgsd->bkcd", change, asked),
      jnp.einsum("bkgsc,bkgsd->bkcd", weights, given),
    )

  padded = jnp.pad(
    key_positions, ((0, 0), (0, count * size - slots)), constant_values=-1
  )
  places = jnp.moveaxis(padded.reshape(batch, count, size), 1, 0)
  total, (of_keys, of_values) = jax.lax.scan(
    visit, jnp.zeros_like(asked), (cut(keys), cut(values), places)
  )
  return Cotangents(
    total.reshape(queries.shape), join(of_keys), join(of_values)
  )
