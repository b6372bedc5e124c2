"""The visibility of the slots of pages."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def owners_of(
  query_positions: Int[Array, "B 1"],
  key_positions: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
) -> Int[Array, "B R P"]:
  """Computes the KV head of each slot that is visible to a token, else -1.

  Args:
    query_positions: position of the token in each row, -1 for padding.
    key_positions: position of each slot's token in its row, -1 for empty.
    heads: KV head of each page, -1 for an unused page.
  """
  visible = (key_positions >= 0) & (heads >= 0)[..., None]
  visible = visible & (key_positions <= query_positions[..., None])
  # One number per slot tells kernels both whose it is and whether it is masked.
  return jnp.where(visible, heads[..., None], -1)
