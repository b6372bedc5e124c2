"""Where the pages of one layer are among those of a pool."""

import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, Shaped


class Span(NamedTuple):
  """How far apart the pages of a row are that have a head.

  Attributes:
    part: pages of each part of a row, such as those of one device.
    most: consecutive pages of a part that all those with a head are among.
  """

  part: int
  most: int


class Window(NamedTuple):
  """Consecutive pages to read in each of the n parts of a row.

  Attributes:
    first: the first of them, from which on `span.most` are in the part.
    span: sizes of the parts and of the window.
  """

  first: Int[Array, "B n"]
  span: Span

  @classmethod
  def of(cls, heads: Int[Array, "B R"], span: Span | None) -> Self | None:
    """Finds the pages that have a head; None if all pages are to be read.

    Args:
      heads: KV head of each page, -1 for a page that is not to be read.
      span: where the others are; None for anywhere.
    """
    if span is None:
      return None
    # A mesh of other devices may have cut through the parts.
    part, most = math.gcd(span.part, heads.shape[1]), span.most
    if most >= part:
      return None
    used = heads.reshape(heads.shape[0], -1, part) >= 0
    first = jnp.argmax(used, axis=2).astype(jnp.int32)
    return cls(jnp.minimum(first, part - most), Span(part, most))

  def first_slots(self, page: int) -> Int[Array, " B"]:
    """First slot to read of each row, of pages with so many slots.

    Raises:
      NotImplementedError: rows have several parts.
    """
    if self.first.shape[1] > 1:
      raise NotImplementedError("The pages to read are in several places.")
    return self.first[:, 0] * page

  def take[Tree: PyTree](self, tree: Tree) -> Tree:
    """Copies the pages to read out of arrays [B, R, ...]."""

    def cut(
      part: Shaped[Array, "R *P"], first: Int[Array, ""]
    ) -> Shaped[Array, "M *P"]:
      return jax.lax.dynamic_slice_in_dim(part, first, self.span.most)

    def take(x: Shaped[Array, "B R *P"]) -> Shaped[Array, "B M *P"]:
      parts = x.reshape(*self.first.shape, self.span.part, *x.shape[2:])
      taken = jax.vmap(jax.vmap(cut))(parts, self.first)
      return taken.reshape(x.shape[0], -1, *x.shape[2:])

    return jax.tree.map(take, tree)
