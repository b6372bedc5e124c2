"""Who sees which slot of the pages."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def owners_of(
  query_positions: Int[Array, "B 1"],
  key_positions: Int[Array, "B R P"],
  heads: Int[Array, "B R"],
) -> Int[Array, "B R P"]:
  """The KV head of each slot that a token sees, -1 for what it does not see.

  Args:
    query_positions: place of the token in each row, -1 for padding.
    key_positions: place of each slot's token in its row, -1 for empty.
    heads: KV head of each page, -1 for an unused page.
  """
  seen = (key_positions >= 0) & (heads >= 0)[..., None]
  seen = seen & (key_positions <= query_positions[..., None])
  return jnp.where(seen, heads[..., None], -1)
